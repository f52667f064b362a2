//! Findings on six recorded hosts. The records are small and written by hand; `lunette doctor --record` creates one from a real host.

use doctor::{DiskOf, Finding, Host, Question, examine};

fn host(name: &str) -> Host {
    let path = format!("{}/hosts/{name}.txt", env!("CARGO_MANIFEST_DIR"));
    Host::recorded(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn disk(path: &str) -> DiskOf {
    DiskOf {
        name: "d0".to_owned(),
        path: path.to_owned(),
        ..DiskOf::default()
    }
}

fn found(name: &str, disks: Vec<DiskOf>) -> Vec<Finding> {
    let question = Question {
        disks,
        ..Question::default()
    };
    examine(&host(name), &question)
}

/// Returns the names of checks with findings worth fixing, and of those with notes.
fn checks(findings: &[Finding]) -> (Vec<&str>, Vec<&str>) {
    let names = |worth: bool| {
        findings
            .iter()
            .filter(|f| f.is_worth_changing == worth)
            .map(|f| f.check)
            .collect()
    };
    (names(true), names(false))
}

#[test]
fn laptop() {
    let findings = found("laptop", vec![]);
    let (worth, known) = checks(&findings);
    assert_eq!(
        worth,
        [
            "governor",
            "sleep_states",
            "apicv",
            "scheduler",
            "shared_huge_pages",
            "nofile",
            "swappiness"
        ]
    );
    assert_eq!(
        known,
        ["mitigations", "smt", "writeback_throttling", "memlock"]
    );
    assert_eq!(
        findings[0].found,
        "CPU frequency governor powersave on 8 of 8 CPUs"
    );
    let command = "for f in /sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor; do echo performance > $f; done";
    assert_eq!(findings[0].command.as_deref(), Some(command));
    assert!(
        findings[1]
            .found
            .contains("C10, with a wake-up latency of 890 us")
    );
    assert_eq!(
        findings[3].command.as_deref(),
        Some("echo none > /sys/block/nvme0n1/queue/scheduler")
    );
}

#[test]
fn server_of_two_sockets() {
    let findings = found("xeon", vec![]);
    let (worth, known) = checks(&findings);
    // The rotating disk keeps its scheduler, and C6 is disabled.
    assert_eq!(
        worth,
        [
            "interrupts",
            "kvm_halt_poll",
            "ksm",
            "zone_reclaim",
            "rmem_max",
            "wmem_max"
        ]
    );
    assert_eq!(
        known,
        [
            "idle_poll",
            "mitigations",
            "numa",
            "memlock",
            "dirty",
            "mtu"
        ]
    );
    assert!(
        findings[0]
            .found
            .contains("all 2 interrupts of disks go to CPU 0")
    );
}

#[test]
fn server_with_images_on_a_copy_on_write_file_system() {
    let findings = found("epyc", vec![disk("/srv/vm.raw")]);
    let (worth, known) = checks(&findings);
    assert_eq!(worth, ["avic", "copy_on_write"]);
    assert_eq!(known, ["mitigations", "memlock", "dirty"]);
    assert!(findings[1].found.starts_with("d0 lies on btrfs (/srv)"));
    assert!(
        checks(&found("epyc", vec![disk("/var/lib/vm.raw")]))
            .0
            .eq(&["avic"])
    );
}

#[test]
fn virtual_machine_of_a_provider() {
    let findings = found("cloud", vec![]);
    let (worth, known) = checks(&findings);
    assert_eq!(
        worth,
        ["halt_poll", "scheduler", "huge_pages", "shared_huge_pages"]
    );
    assert_eq!(known, ["mitigations", "steal", "kvm", "memlock"]);
    let steal = findings
        .iter()
        .find(|finding| finding.check == "steal")
        .unwrap();
    assert!(steal.found.starts_with("3.1 %"), "{}", steal.found);
}

#[test]
fn guest_gets_findings_on_queues_but_not_on_kvm() {
    let question = Question {
        disks: vec![],
        is_guest: true,
        ..Question::default()
    };
    let findings = examine(&host("cloud"), &question);
    let (worth, known) = checks(&findings);
    assert_eq!(worth, ["halt_poll", "scheduler", "queues", "huge_pages"]);
    assert_eq!(known, ["mitigations", "steal"]);
}

/// Replaces the content of a file of a recorded host.
fn with_file(name: &str, file: &str, content: &str) -> Host {
    let text = host(name).record();
    let heading = format!("--- {file}\n");
    let rest: String = match text.split_once(&heading) {
        Some((before, after)) => {
            let next = after.find("--- ").unwrap_or(after.len());
            format!("{before}{}", &after[next..])
        }
        None => text,
    };
    Host::recorded(&format!("{rest}{heading}{content}\n")).unwrap()
}

#[test]
fn virtio_blk_disk_reported_as_rotating_needs_no_scheduler() {
    let host = with_file("cloud", "/sys/block/vda/queue/rotational", "1");
    let findings = examine(&host, &Question::default());
    assert!(checks(&findings).0.contains(&"scheduler"));
}

#[test]
fn slow_clock_source_is_found_and_a_faster_one_is_named() {
    const FOLDER: &str = "/sys/devices/system/clocksource/clocksource0";
    let of = |current: &str, available: &str| {
        let host = with_file("cloud", &format!("{FOLDER}/current_clocksource"), current);
        let text = format!(
            "{}--- {FOLDER}/available_clocksource\n{available}\n",
            host.record()
        );
        let host = Host::recorded(&text).unwrap();
        let findings = examine(&host, &Question::default());
        findings
            .into_iter()
            .find(|finding| finding.check == "clock_source")
    };
    let slow = of("hpet", "kvm-clock tsc hpet acpi_pm").unwrap();
    assert!(slow.is_worth_changing);
    assert_eq!(slow.found, "the clock source is hpet");
    assert_eq!(
        slow.command.as_deref(),
        Some("echo kvm-clock > /sys/devices/system/clocksource/clocksource0/current_clocksource")
    );
    let alone = of("acpi_pm", "acpi_pm").unwrap();
    assert!(alone.command.unwrap().contains("kvm-clock"));
    assert_eq!(of("kvm-clock", "kvm-clock tsc hpet acpi_pm"), None);
    assert_eq!(of("tsc", "tsc hpet acpi_pm"), None);
}

#[test]
fn server_of_arm() {
    let findings = found("arm", vec![]);
    let (worth, known) = checks(&findings);
    assert_eq!(worth, ["governor", "sleep_states"]);
    assert_eq!(known, ["memlock", "dirty"]);
}

#[test]
fn container() {
    let disks = vec![
        DiskOf {
            is_cached: true,
            size: Some((1 << 30, 1 << 20)),
            ..disk("/vm.raw")
        },
        disk("/data/vm.raw"),
    ];
    let findings = found("container", disks);
    let (worth, known) = checks(&findings);
    assert_eq!(worth, ["kvm", "overlay"]);
    assert_eq!(known, ["quota", "two_caches", "sparse", "memlock", "dirty"]);
    assert_eq!(findings[0].command.as_deref(), Some("modprobe kvm_amd"));
    assert!(findings[2].found.contains("limited to 1.5 CPUs"));
}

#[test]
fn host_without_files_only_lacks_kvm() {
    let empty = Host::recorded("").unwrap();
    let findings = examine(&empty, &Question::default());
    assert_eq!(checks(&findings), (vec![], vec!["kvm"]));
}

#[test]
fn unparsable_files_are_skipped() {
    for name in ["laptop", "xeon", "cloud", "container"] {
        let text = host(name).record();
        for word in ["", "-1", "[", "0-", "\u{fffd} x [y", "99999999999999999999"] {
            let spoilt: String = text
                .lines()
                .map(|line| {
                    if line.starts_with("--- ") {
                        format!("{line}\n")
                    } else {
                        format!("{word}\n")
                    }
                })
                .collect();
            let question = Question {
                disks: vec![disk("/srv/x.raw"), disk("/dev/nvme0n1p1")],
                ..Question::default()
            };
            examine(&Host::recorded(&spoilt).unwrap(), &question);
        }
    }
}
