# Targets for users and maintainers. `make help` lists them. scripts/setup announces each package before it installs it.

SHELL := /bin/bash
CARGO ?= cargo
PREFIX ?= /usr/local
DESTDIR ?=
FUZZ_SECONDS ?= 60
DRIVER_CPU ?= 0
DEVICE_CPU ?= 1
bindir = $(PREFIX)/bin
libexecdir = $(PREFIX)/libexec
# QEMU and libvirt look in /usr/share, that is PREFIX=/usr, and in /etc/qemu/vhost-user
descriptordir = $(PREFIX)/share/qemu/vhost-user
mandir = $(PREFIX)/share/man
bashdir = $(PREFIX)/share/bash-completion/completions
zshdir = $(PREFIX)/share/zsh/site-functions
fishdir = $(PREFIX)/share/fish/vendor_completions.d
systemddir = $(PREFIX)/lib/systemd/system
sysusersdir = $(PREFIX)/lib/sysusers.d
tmpfilesdir = $(PREFIX)/lib/tmpfiles.d
# rustup's default folder, for shells that have not read ~/.cargo/env
export PATH := $(PATH):$(HOME)/.cargo/bin
# Errors of end-to-end tests have enough context; a backtrace of the test runner adds nothing.
export RUST_LIB_BACKTRACE := 0
target_directory = $(or $(CARGO_TARGET_DIR),target)
version := $(shell sed -n '/^version = /{s/.*"\(.*\)"/\1/p;q}' Cargo.toml)
# Result files of `lunette bench` contain the commit. A source archive is that of a release.
export LUNETTE_COMMIT := $(or $(shell git describe --always --dirty 2>/dev/null),v$(version))
# rustup selects the compiler of rust-toolchain.toml, which may be installed under the name "stable" only.
toolchain := $(shell PATH='$(PATH)' scripts/toolchain)
ifneq ($(toolchain),)
export RUSTUP_TOOLCHAIN := $(toolchain)
endif
# Counts of `make profile`, if they are from the same compiler: other compilers name functions differently. With RUSTFLAGS no profile is
# used.
compiler := $(shell PATH='$(PATH)' $(if $(toolchain),RUSTUP_TOOLCHAIN=$(toolchain)) rustc -vV 2>/dev/null | awk '/^release/ { r = $$2 } /^LLVM/ { l = $$3 } END { print "rustc-" r "-llvm-" l }')
profile := $(if $(RUSTFLAGS),,$(wildcard $(CURDIR)/profile/$(compiler).profdata))
export LUNETTE_PROFILE := $(if $(profile),$(compiler))
rust_version := $(shell sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
programs = -p lunette -p lunette_lab
# Programs that run in guests of `lunette vm`. They are linked statically, and therefore built in a separate folder.
agent_directory = $(target_directory)/guest-agent
guest_programs = $(agent_directory)/x86_64-unknown-linux-gnu/release
# Programs contain no folder of this machine: builds in other folders give the same bytes. RUSTFLAGS has precedence over these flags. A build
# ID would also cover names of symbols that packages do not contain, and in which LLVM numbers modules differently from build to build.
cargo_home := $(or $(CARGO_HOME),$(HOME)/.cargo)
comma := ,
reproducible = "--remap-path-prefix=$(CURDIR)=/lunette","--remap-path-prefix=$(abspath $(target_directory))=/lunette/target","--remap-path-prefix=$(cargo_home)=/cargo","-Clink-arg=-Wl,--build-id=none"
# ring contains C and assembly.
renamed_folders_in_c = $(CFLAGS) -ffile-prefix-map=$(abspath $(target_directory))=/lunette/target -ffile-prefix-map=$(cargo_home)=/cargo
release = CFLAGS='$(renamed_folders_in_c)' $(CARGO) build --release \
	--config 'build.rustflags=[$(if $(profile),"-Cprofile-use=$(profile)"$(comma))$(reproducible)]'
# Build of the daemon as one file that needs no library.
musl = x86_64-unknown-linux-musl
static_program = $(target_directory)/$(musl)/release/lunette
as_root = $(if $(filter 0,$(shell id -u)),,sudo -E env PATH="$$PATH")

.PHONY: help build page profile demo bench bench-iscsi bench-images bench-rbd test test-fast test-one test-upgrade toy check formatting lints msrv spelling advisories unit unit-tests privileged-tests tests-built guests sim soak fuzz fuzz-asan miri tsan deb static oci release release-check install uninstall clean

help: ## Lists the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## Builds the optimised programs, lunette and lunette-lab
	@scripts/setup build
	@$(if $(profile),:,echo "build: no profile for this compiler in profile/, or RUSTFLAGS is set: the programs are somewhat slower; hint: make profile")
	$(release) $(programs)
	env -u RUSTFLAGS $(CARGO) build --release -p guest_agent -p guest_bench --target x86_64-unknown-linux-gnu --target-dir $(agent_directory) \
		--config 'build.rustflags=["-Ctarget-feature=+crt-static","-Cstrip=debuginfo",$(reproducible)]'

page: ## Builds the page for browsers from its sources (crates/page/web), with npm
	@scripts/setup page
	cd crates/page/web && npm ci --ignore-scripts --no-audit && npm run check && npm run build

profile: ## Records hot code under load of every transport in profile/, for build and the benchmarks
	@scripts/setup profile
	@scripts/profile $(target_directory) $(compiler) $(DRIVER_CPU) $(DEVICE_CPU)

demo: ## Measures two disks in a real guest and shows the latency of each stage; stays until Enter, or for DEMO_SECONDS
	@scripts/setup demo
	@echo "demo: building in release"
	@$(release) --quiet -p lunette -p xtask
	@LUNETTE_BIN=$(abspath $(target_directory))/release/lunette $(target_directory)/release/xtask demo

bench: ## Compares virtio-blk and virtio-scsi with qemu-storage-daemon and writes the table to docs/lab (DRIVER_CPU, DEVICE_CPU)
	@scripts/setup bench
	@echo "bench: building in release"
	@$(release) --quiet $(programs)
	@$(target_directory)/release/lunette bench table \
		--place $(target_directory)/bench --notes docs/lab --driver-cpu $(DRIVER_CPU) --device-cpu $(DEVICE_CPU)

bench-iscsi: ## Compares iSCSI with tgt and writes the table to docs/lab (DRIVER_CPU, DEVICE_CPU)
	@scripts/setup bench-iscsi
	@echo "bench-iscsi: building in release"
	@$(release) --quiet $(programs)
	@$(as_root) $(target_directory)/release/lunette bench iscsi-table \
		--place $(target_directory)/bench --notes docs/lab --driver-cpu $(DRIVER_CPU) --device-cpu $(DEVICE_CPU)

bench-images: ## Compares a qcow2 image with a raw file and qemu-storage-daemon and writes the table to docs/lab (DRIVER_CPU, DEVICE_CPU)
	@scripts/setup bench
	@echo "bench-images: building in release"
	@$(release) --quiet $(programs)
	@$(target_directory)/release/lunette bench image-table \
		--place $(target_directory)/bench --notes docs/lab --driver-cpu $(DRIVER_CPU) --device-cpu $(DEVICE_CPU)

bench-rbd: ## Compares images of a Ceph cluster on this machine with qemu-storage-daemon and writes the table to docs/lab
	@scripts/setup bench-rbd
	@echo "bench-rbd: building in release"
	@$(release) --quiet $(programs) -p xtask
	@$(target_directory)/release/xtask ceph $(target_directory)/release/lunette bench rbd-table --repetitions 10 --turn-ms 500 \
		--place $(target_directory)/bench --notes docs/lab --driver-cpu $(DRIVER_CPU) --device-cpu $(DEVICE_CPU)

test: ## Checks formatting and clippy, runs unit and property tests, then tests in real guests
	@scripts/setup test
	@MAKE='$(MAKE)' scripts/test

test-fast: check unit ## Checks formatting and clippy, runs unit and property tests: everything without guests

test-one: ## Runs one file of end-to-end tests: make test-one T=durability; or one test of it: T='durability errors'
	@test -n "$(T)" || { echo "test-one: T is missing; hint: make test-one T=durability, or one of these:" >&2; ls tests/tests | sed 's/^/  /; s/\.rs$$//' >&2; exit 2; }
	@test -f "tests/tests/$(firstword $(T)).rs" || { echo "test-one: there is no tests/tests/$(firstword $(T)).rs" >&2; exit 2; }
	@scripts/setup test
	@$(MAKE) --no-print-directory tests-built
	$(sandboxed) LUNETTE_BIN=$(abspath $(target_directory))/debug/lunette $(tests_of) --test $(firstword $(T)) -- --test-threads=1 $(wordlist 2,99,$(T))

test-upgrade: ## Replaces daemons with the last release, built from its tag or from TAG, and back, under load and below a guest
	@scripts/setup test
	@$(MAKE) --no-print-directory tests-built
	@$(sandboxed) LUNETTE_BIN=$(abspath $(target_directory))/debug/lunette CARGO='$(CARGO)' TAG='$(TAG)' scripts/test-upgrade

check: formatting lints ## Checks formatting, clippy and cargo doc (warnings denied), dependencies (unused, licences, sources), and the build of make static

formatting:
	$(CARGO) fmt --all --check
	@for tool in cargo-machete cargo-deny; do \
		command -v $$tool > /dev/null || { echo "check: $$tool is missing; hint: cargo install --locked $$tool" >&2; exit 1; }; \
	done
	$(CARGO) machete --with-metadata
	$(CARGO) deny check bans licenses sources

lints:
	CUSTOM_LIBFUZZER_PATH=/not/linked/libfuzzer.a $(CARGO) clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --quiet --workspace --exclude lunette-fuzz --no-deps --document-private-items
	$(CARGO) check -p lunette --target $(musl)

# The oldest compiler has other features, so it builds in a folder of its own.
msrv: ## Checks the build with the oldest supported compiler, rust-version in Cargo.toml, which rustup installs if it is missing
	@rustup toolchain list | grep -q '^$(rust_version)' || rustup toolchain install --profile minimal $(rust_version)
	$(CARGO) +$(rust_version) check --locked --workspace --exclude lunette-fuzz --all-targets --target-dir $(target_directory)/msrv

spelling: ## Checks the spelling of all files with typos; typos.toml lists exceptions
	@command -v typos > /dev/null || { echo "spelling: typos is missing; hint: cargo install --locked typos-cli, or pip install typos" >&2; exit 1; }
	typos

# Always builds the whole workspace and selects tests by name: for one crate alone, dependencies would be built again with other features.
# Names of end-to-end test files are therefore unique in the workspace.
tests_of = $(CARGO) test --workspace --exclude lunette-fuzz --no-fail-fast

tests-built:
	$(CARGO) build --workspace --exclude lunette-fuzz --bins --tests

# Daemons of end-to-end tests run in the sandbox of the packaged unit, also those that `lunette bench` and `lunette vm run` start.
sandboxed = LUNETTE_SANDBOX=$(or $(LUNETTE_SANDBOX),enforce) LUNETTE_SANDBOX_PATHS=$(or $(LUNETTE_GUEST_DIR),$(CURDIR)/build/guest)

advisories: ## Fetches RustSec's database and checks the dependencies for known defects; ADVISORY_DB=DIR uses a clone instead
	@CARGO='$(CARGO)' ADVISORY_DB='$(ADVISORY_DB)' scripts/advisories

unit: unit-tests privileged-tests ## Runs unit and property tests; with sudo those that need root and loop devices

unit-tests:
	$(tests_of) --exclude end_to_end

privileged-tests: tests-built
	LUNETTE_BIN=$(abspath $(target_directory))/debug/lunette $(as_root) $(tests_of) --test machine --test followed --test block_device_targets --test hung_storage -- --ignored

guests: $(if $(TEST_PROGRAMS),,tests-built) ## Runs end-to-end tests in four lanes, and in the background the simulator and the fuzz targets
	@$(sandboxed) LUNETTE_BIN=$(abspath $(target_directory))/debug/lunette FUZZ_SECONDS=$(FUZZ_SECONDS) scripts/guests

sim: ## Runs the data path on simulated clock, disks and network, with fresh seeds for MINUTES (10)
	@$(CARGO) run --quiet --profile sim -p sim -- --minutes $(or $(MINUTES),10) --jobs $$(nproc)

soak: ## Runs verifying clients through kills, upgrades, the OOM killer, full and failing file systems for MINUTES (10), and through 1000 resizes and snapshots; prints the longest pauses
	@scripts/setup test
	$(CARGO) build --workspace --exclude lunette-fuzz --bins --tests
	$(sandboxed) SOAK_MINUTES=$(or $(MINUTES),10) SOAK_CHANGES=1000 LUNETTE_BIN=$(abspath $(target_directory))/debug/lunette $(tests_of) --test soak -- --nocapture

# Built in a folder of its own, so that the program with the toy replaces no other.
toy = $(abspath $(target_directory))/toy

toy: ## Adds a block device to a copy of this tree by the steps of docs/extending.md (tests/toy.patch), tests it and serves a disk of it
	@rm -rf $(toy) && mkdir -p $(toy) && git archive HEAD | tar -x -C $(toy) && patch -s -p1 -d $(toy) < tests/toy.patch
	@cd $(toy) && export CARGO_TARGET_DIR=$(toy)/target && \
	LUNETTE_WRITE_DOCS=1 $(CARGO) test -q -p config --test configuration_page && $(CARGO) test -q -p config && \
	$(CARGO) test -q -p bdev --lib capabilities && $(CARGO) build -q -p lunette && \
	{ timeout -s INT 5 $$CARGO_TARGET_DIR/debug/lunette serve --disk d0=toy:1M --vhost-blk d0:$(toy)/d0.sock --control $(toy)/control.sock || true; } | \
	grep "^ready vhost-blk d0 "
	@rm -rf $(toy)

fuzz: ## Runs each fuzz target for FUZZ_SECONDS (60), guided by coverage; make test runs them as long, without a nightly compiler
	@scripts/setup fuzz
	@cd fuzz && for fuzz_target in $$($(CARGO) +nightly fuzz list); do \
		echo "fuzz: $$fuzz_target for $(FUZZ_SECONDS) s"; \
		mkdir -p "found/$$fuzz_target" && \
		$(CARGO) +nightly fuzz run "$$fuzz_target" "found/$$fuzz_target" "corpus/$$fuzz_target" -- -max_total_time=$(FUZZ_SECONDS) -print_final_stats=1 || exit 1; \
	done

# Sanitizers and Miri build with a nightly compiler, each in a folder of its own.
fuzz-asan: ## Each fuzz target for FUZZ_SECONDS (60) with AddressSanitizer, without cargo-fuzz: needs a nightly compiler
	@scripts/setup fuzz-asan
	FUZZ_SECONDS=$(FUZZ_SECONDS) RUSTFLAGS='-Zsanitizer=address' $(CARGO) +nightly test -p fuzz_targets --test fuzzing \
		--target x86_64-unknown-linux-gnu --target-dir $(target_directory)/asan

# Memory that a client changes is loaded without atomics on purpose (crates/guest_memory/src/volatile.rs), so that tests of it would report a
# race. Copies of large ranges take hours in Miri, which also has no memfd and no SIGBUS.
miri: ## Unit tests of client memory and rings of the corpus in Miri, which finds undefined behaviour: needs a nightly compiler
	@scripts/setup miri
	export MIRIFLAGS='-Zmiri-disable-isolation -Zmiri-ignore-leaks -Zmiri-permissive-provenance' PROPTEST_CASES=2; \
	$(CARGO) +nightly miri test -p guest_memory --lib -- --skip words_of_a_copy --skip copy:: --skip mapping:: --skip sigbus:: && \
	$(CARGO) +nightly miri test -p virtqueue --test random_bytes -- --skip random_bytes_never

# One test at a time: ThreadSanitizer does not see system calls of rustix, so a mapping at the address of an earlier one looks like a race.
tsan: ## Unit tests of counters, client memory and iSCSI sessions with ThreadSanitizer: needs a nightly compiler
	@scripts/setup tsan
	PROPTEST_CASES=4 RUSTFLAGS='-Zsanitizer=thread' $(CARGO) +nightly test -Zbuild-std -p latency -p guest_memory -p iscsi --lib \
		--target x86_64-unknown-linux-gnu --target-dir $(target_directory)/tsan -- --test-threads=1 --skip words_of_a_copy --skip copy::

static: ## Builds the daemon as one static program (musl) for any Linux on x86-64; without Ceph, because it cannot load libraries
	@scripts/setup static
	$(release) -p lunette --target $(musl)
	@echo $(static_program)

oci: static ## Builds an OCI image of the static program in target/oci and target/oci.tar, without a container engine
	@scripts/oci $(static_program) $(target_directory)/oci

deb: ## Builds Debian packages of the built programs, in OUT (target/debian)
	@test -x $(target_directory)/release/lunette || { echo "deb: nothing is built yet; hint: make build" >&2; exit 1; }
	@scripts/setup deb
	@scripts/deb $(target_directory) $(or $(OUT),$(target_directory)/debian)

release: ## Checks that HEAD is a release, builds all packages with checksums, SBOMs and notes in OUT; TWICE=1 compares two builds
	@MAKE='$(MAKE)' CARGO='$(CARGO)' scripts/release

release-check: ## Checks version, changelog, profile, samples and tag of a release
	@CARGO='$(CARGO)' scripts/release check

install: ## Installs the built programs, their man pages, completions, systemd units, and descriptors for QEMU (PREFIX, DESTDIR)
	@test -x $(target_directory)/release/lunette || { echo "install: nothing is built yet; hint: make build" >&2; exit 1; }
	@test -x $(target_directory)/release/lunette-lab || { echo "install: lunette-lab is not built yet; hint: make build" >&2; exit 1; }
	install -d $(DESTDIR)$(bindir)
	install -m 755 $(target_directory)/release/lunette $(target_directory)/release/lunette-lab $(DESTDIR)$(bindir)
	install -d $(DESTDIR)$(bashdir) $(DESTDIR)$(zshdir) $(DESTDIR)$(fishdir) $(DESTDIR)$(systemddir)
	@for program in lunette lunette-lab; do \
		built=$(target_directory)/release/$$program; \
		echo "install man pages and completions of $$program"; \
		$$built man $(DESTDIR)$(mandir) && \
		$$built completion bash > $(DESTDIR)$(bashdir)/$$program && \
		$$built completion zsh > $(DESTDIR)$(zshdir)/_$$program && \
		$$built completion fish > $(DESTDIR)$(fishdir)/$$program.fish || exit 1; \
	done
	@for program in guest-agent guest-bench; do \
		built=$(guest_programs)/$$program; \
		if test -x $$built; then \
			echo "install $(DESTDIR)$(libexecdir)/lunette/$$program"; \
			install -D -m 755 $$built $(DESTDIR)$(libexecdir)/lunette/$$program || exit 1; \
		else echo "install: $$program is not built: some functions of lunette vm will not work; hint: make build" >&2; fi; \
	done
	sed "s|@BINDIR@|$(bindir)|" contrib/systemd/lunette.service.in > $(DESTDIR)$(systemddir)/lunette.service
	install -m 644 contrib/systemd/lunette.socket $(DESTDIR)$(systemddir)/lunette.socket
	install -D -m 644 contrib/systemd/sysusers.conf $(DESTDIR)$(sysusersdir)/lunette.conf
	install -D -m 644 contrib/systemd/tmpfiles.conf $(DESTDIR)$(tmpfilesdir)/lunette.conf
	@for kind in blk scsi; do \
		entry=$(libexecdir)/lunette-vhost-user-$$kind; \
		descriptor=$(descriptordir)/50-lunette-$$kind.json; \
		echo "install $(DESTDIR)$$entry"; \
		echo "install $(DESTDIR)$$descriptor"; \
		install -d $(DESTDIR)$(libexecdir) $(DESTDIR)$(descriptordir) && \
		printf '#!/bin/sh\n# Program for the descriptor, which cannot contain a subcommand.\nexec %s vhost-user-%s "$$@"\n' \
			$(bindir)/lunette $$kind > $(DESTDIR)$$entry && chmod 755 $(DESTDIR)$$entry && \
		sed "s|@ENTRY@|$$entry|" scripts/50-lunette-$$kind.json.in > $(DESTDIR)$$descriptor || exit 1; \
	done

uninstall: ## Removes the files of make install
	rm -f $(DESTDIR)$(bindir)/lunette{,-lab} $(DESTDIR)$(libexecdir)/{lunette-vhost-user-{blk,scsi},lunette/guest-{agent,bench}} \
		$(DESTDIR)$(descriptordir)/50-lunette-{blk,scsi}.json $(DESTDIR)$(mandir)/{man1/lunette{,-*}.1,man5/lunette.toml.5} \
		$(DESTDIR)$(bashdir)/lunette{,-lab} $(DESTDIR)$(zshdir)/_lunette{,-lab} $(DESTDIR)$(fishdir)/lunette{,-lab}.fish \
		$(DESTDIR)$(systemddir)/lunette.{service,socket} $(DESTDIR){$(sysusersdir),$(tmpfilesdir)}/lunette.conf

clean: ## Removes all built files and the guests' files
	$(CARGO) clean
	rm -rf build
