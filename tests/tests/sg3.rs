//! The SCSI core as a guest's sg3-utils see it over vhost-user-scsi. Compares their output.
#![forbid(unsafe_code)]

use end_to_end::rig::kernel_is_content;
use end_to_end::{Guest, GuestBuilder, Result, Rig, ensure};

/// A guest with two disks of 64 MiB: a file with 512-byte blocks and memory with 4096-byte blocks.
struct Bench {
    guest: Guest,
    /// Names of the block device and of the SCSI generic device.
    file: [String; 2],
    memory: [String; 2],
    rig: Rig,
}

impl Bench {
    fn new(name: &str) -> Result<Bench> {
        let rig = Rig::new(|daemon| {
            daemon
                .disk("d=file:d.raw,size=64M,cache=writeback,serial=alpha,wwn=3a5b000000000001")
                .disk("e=ram:64M,serial=beta")
                .vhost_scsi("c")
                .lun("c/0:0=d")
                .lun("c/0:1=e")
                .arguments(["--workers", "2"])
        })?;
        let mut guest = GuestBuilder::new(name)
            .vhost_user_scsi(&rig.socket("c"), 1)
            .boot()?;
        let mut names = |lun| -> Result<[String; 2]> {
            let disk = guest.scsi_disk(0, 0, lun)?;
            let generic = guest.ok(&format!("ls /sys/block/{disk}/device/scsi_generic"))?;
            Ok([format!("/dev/{disk}"), format!("/dev/{}", generic.trim())])
        };
        let (file, memory) = (names(0)?, names(1)?);
        Ok(Bench {
            guest,
            file,
            memory,
            rig,
        })
    }

    /// Runs a command and checks its exit code and output. `D` and `E` stand for the two disks, `SD` and `SE` for their generic
    /// devices.
    fn expect(&mut self, command: &str, code: i32, lines: &[&str]) -> Result<()> {
        let words: Vec<String> = command.split(' ').map(|word| self.placed(word)).collect();
        let command = words.join(" ");
        let output = self.guest.run(&format!("{command} 2>&1"))?;
        let printed = &output.stdout;
        ensure!(
            output.code == code,
            "{command}: exit code {}, not {code}\n{printed}",
            output.code
        );
        // The tools' padding and indentation vary.
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let all = words(printed);
        for line in lines {
            ensure!(
                all.contains(&words(line)),
                "{command}: no {line:?} in\n{printed}"
            );
        }
        Ok(())
    }

    /// Checks the first MiB of the file: this many zeroes and `y`, the rest `x`.
    fn counts(&mut self, zeroes: usize, ys: usize) -> Result<()> {
        let file = std::fs::read(self.rig.scratch.file("d.raw"))?;
        let start = &file[..1 << 20];
        let count = |byte| start.iter().filter(|&&found| found == byte).count();
        let (found, expected) = (
            [count(0), count(b'y'), count(b'x')],
            [zeroes, ys, (1 << 20) - zeroes - ys],
        );
        ensure!(
            found == expected,
            "zeroes, y, x: {found:?}, not {expected:?}"
        );
        Ok(())
    }

    fn placed(&self, word: &str) -> String {
        let (prefix, name) = match word.split_once('=') {
            Some((prefix, name)) => (format!("{prefix}="), name),
            None => (String::new(), word),
        };
        let place = match name {
            "D" => &self.file[0],
            "SD" => &self.file[1],
            "E" => &self.memory[0],
            "SE" => &self.memory[1],
            _ => return word.to_owned(),
        };
        prefix + place
    }
}

/// Exit codes of sg3-utils for the sense key of a response (manual page sg3_utils(8)).
const NOT_READY: i32 = 2;
const ILLEGAL_REQUEST: i32 = 5;
const UNIT_ATTENTION: i32 = 6;
const INVALID_OPCODE: i32 = 9;
const MISCOMPARE: i32 = 14;
const LBA_OUT_OF_RANGE: i32 = 22;
const RESERVATION_CONFLICT: i32 = 24;

#[test]
#[allow(
    clippy::too_many_lines,
    reason = "one test, from its beginning to its end"
)]
fn inquiry_data_match_sg3_utils() -> Result<()> {
    let mut bench = Bench::new("sg3-says")?;
    for (command, lines) in [
        (
            "sg_inq D",
            &[
                "PDT=0",
                "version=0x06",
                "HiSUP=1",
                "Resp_data_format=2",
                "TPGS=3",
                "3PC=1",
                "CmdQue=1",
                "Vendor identification: LUNETTE",
                "Unit serial number: alpha",
            ][..],
        ),
        ("sg_inq E", &["Unit serial number: beta"]),
        (
            "sg_vpd D",
            &[
                "Supported VPD pages [sv] Unit serial number [sn] Device identification [di] Extended inquiry data [ei] SCSI ports [sp] \
                 Third party copy [tpc] Block limits (SBC) [bl] Block device characteristics (SBC) [bdc] \
                 Logical block provisioning (SBC) [lbpv]",
            ],
        ),
        (
            "sg_vpd -p di D",
            &[
                "designator type: NAA, code set: Binary 0x3",
                "vendor id: LUNETTE vendor specific: 3a5b000000000001",
                "Target port: designator type: Relative target port, code set: Binary Relative target port: 0x1",
                "designator type: Target port group, code set: Binary Target port group: 0x1",
            ],
        ),
        (
            "sg_vpd -p bl D",
            &[
                "Maximum compare and write length: 255 blocks",
                "Maximum unmap block descriptor count: 256",
                "Maximum atomic transfer length: 0 blocks",
            ],
        ),
        // Writes to a file in the page cache are not atomic, writes to memory are.
        (
            "sg_vpd -p bl E",
            &["Maximum atomic transfer length: 2048 blocks"],
        ),
        ("sg_opcodes -o 0x9c D", &["Command is NOT supported"]),
        ("sg_opcodes E", &["9c 16 0,0 Write atomic(16)"]),
        (
            "sg_vpd -p lbpv D",
            &[
                "(LBPU): 1",
                "(LBPWS): 1",
                "(LBPWS10): 1",
                "(LBPRZ): 1",
                "Provisioning type: 2 (thin provisioned)",
            ],
        ),
        ("sg_vpd -p bdc E", &["Non-rotating medium"]),
        (
            "sg_vpd -p tpc D",
            &[
                "Extended copy(LID1)",
                "block -> block [0x2]",
                "Maximum segment length: 67108864",
            ],
        ),
        (
            "sg_vpd -p ei D",
            &["HEADSUP=1 ORDSUP=1 SIMPSUP=1", "LUICLR=1"],
        ),
        (
            "sg_luns D",
            &["2 lun entries", "0000000000000000 0001000000000000"],
        ),
        ("sg_luns -s 1 D", &["1 lun entry", "c101000000000000"]),
        (
            "sg_readcap -l D",
            &[
                "lbpme=1, lbprz=1",
                "Number of logical blocks=131072",
                "Logical block length=512 bytes",
                "physical block length=4096 bytes",
            ],
        ),
        (
            "sg_opcodes D",
            &[
                "04 6 0,0 Format Unit",
                "28 10 0,0 Read(10)",
                "42 10 0,0 Unmap",
                "48 3 10 0,0 Sanitize, cryptographic erase",
                "5f 7 10 0,0 Persistent reserve out, register and move",
                "83 1 16 0,0 Extended copy",
                "89 16 0,0 Compare and write",
                "a4 a 12 0,0 Set target port groups",
            ],
        ),
        (
            "sg_opcodes -o 0x28 -R D",
            // CDB usage data: LBA, group number and length count.
            &["Opcode=0x28", "ff ff ff ff", "ff ff"],
        ),
        ("sg_opcodes -o 0xff D", &["Command is NOT supported"]),
        (
            "sg_opcodes -t D",
            &[
                "Abort task",
                "Logical unit reset",
                "Query asynchronous event",
                "I_T nexus reset",
            ],
        ),
        (
            "sg_logs -a D",
            &[
                "0x00 Supported log pages [sp]",
                "0x2f Informational exceptions [ie]",
                "IE asc = 0x0, ascq = 0x0",
            ],
        ),
        (
            "sg_modes D",
            &[
                "DpoFua=1",
                ">> Read-Write error recovery, page_control: current",
                ">> Caching, page_control: current",
                ">> Control, page_control: current",
                ">> Informational exceptions control, page_control: current",
            ],
        ),
        ("sg_requests D", &["Sense key: No Sense"]),
        (
            "sg_copy_results -p D",
            &[
                "Supports no list identifier (SNLID): yes",
                "Segment descriptor 0x02: Copy from block device to block device",
                "Target descriptor 0xe4: Identification descriptor",
            ],
        ),
    ] {
        bench.expect(command, 0, lines)?;
    }
    // REASSIGN BLOCKS
    bench.expect(
        "sg_raw D 07 00 00 00 00 00",
        INVALID_OPCODE,
        &["Illegal Request"],
    )?;
    kernel_is_content(&mut bench.guest)
}

#[test]
#[allow(
    clippy::too_many_lines,
    reason = "one test, from its beginning to its end"
)]
fn modifying_commands_change_only_their_range() -> Result<()> {
    let mut bench = Bench::new("sg3-changes")?;
    let d = bench.file[0].clone();
    bench.guest.ok(&format!(
        "for c in x y; do head -c 512 /dev/zero | tr '\\0' $c >/tmp/$c; done; cat /tmp/x /tmp/y >/tmp/xy; \
         tr '\\0' x </dev/zero | dd of={d} bs=64k count=16 iflag=fullblock oflag=direct"
    ))?;
    // UNMAP of 16 blocks of 512 bytes.
    bench.expect("sg_unmap -f -l 16 -n 16 D", 0, &[])?;
    bench.expect("sg_get_lba_status -l 0 D", 0, &["blocks: 16 mapped"])?;
    bench.expect(
        "sg_get_lba_status -l 16 D",
        0,
        &["LBA: 0x0000000000000010 blocks: 16 deallocated"],
    )?;
    // Anchored blocks read as zeroes and keep their space allocated.
    bench.expect(
        "sg_vpd -p lbpv D",
        0,
        &["Anchored LBAs supported (ANC_SUP): 1"],
    )?;
    bench.expect("sg_unmap -f -a -l 24 -n 16 D", 0, &[])?;
    for (lba, status) in [
        (16, "LBA: 0x0000000000000010 blocks: 8 deallocated"),
        (24, "LBA: 0x0000000000000018 blocks: 16 anchored"),
    ] {
        bench.expect(&format!("sg_get_lba_status -l {lba} D"), 0, &[status])?;
    }
    bench.counts(24 * 512, 0)?;
    bench.expect(
        "sg_write_same -U -a -l 16 -n 8 -x 512 -i /dev/zero D",
        0,
        &[],
    )?;
    bench.expect(
        "sg_write_same -a -l 16 -n 8 -x 512 -i /dev/zero D",
        ILLEGAL_REQUEST,
        &[],
    )?;
    bench.expect(
        "sg_get_lba_status -l 16 D",
        0,
        &["LBA: 0x0000000000000010 blocks: 24 anchored"],
    )?;
    bench.expect(
        "sg_unmap -f -l 0x20000 -n 1 D",
        LBA_OUT_OF_RANGE,
        &["LBA out of range"],
    )?;
    bench.counts(24 * 512, 0)?;

    // COMPARE AND WRITE from x to y. Repeating it fails, because x is no longer there.
    bench.expect(
        "sg_compare_and_write -i /tmp/xy -l 5 -n 1 -x 1024 D",
        0,
        &[],
    )?;
    bench.expect(
        "sg_compare_and_write -i /tmp/xy -l 5 -n 1 -x 1024 D",
        MISCOMPARE,
        &["Miscompare at byte offset: 0"],
    )?;
    bench.counts(24 * 512, 512)?;

    // WRITE SAME with data, and with UNMAP.
    bench.expect("sg_write_same -i /tmp/y -l 100 -n 8 -x 512 D", 0, &[])?;
    bench.counts(24 * 512, 9 * 512)?;
    bench.expect("sg_write_same -U -l 200 -n 8 -x 512 -i /dev/zero D", 0, &[])?;
    bench.counts(32 * 512, 9 * 512)?;

    // VERIFY with the expected data: block 100 is y, block 99 is x.
    bench.expect("sg_verify -l 0 -c 2048 D", 0, &[])?;
    bench.expect("sg_verify -l 100 -c 1 -n 512 -i /tmp/y D", 0, &[])?;
    bench.expect("sg_verify -l 99 -c 1 -n 512 -i /tmp/y D", MISCOMPARE, &[])?;
    bench.expect("sg_sync D", 0, &[])?;

    // EXTENDED COPY to another disk, which is empty before.
    let e = bench.memory[0].clone();
    let sum = |disk: &str, skip| {
        format!("dd if={disk} bs=1M skip={skip} count=1 iflag=direct 2>/dev/null | md5sum")
    };
    let (from, empty) = (bench.guest.ok(&sum(&d, 0))?, bench.guest.ok(&sum(&e, 0))?);
    ensure!(from != empty, "the copy has something to do");
    bench.expect(
        "sg_xcopy if=SD of=SE bs=512 count=2048 seek=2048",
        0,
        &["2048 blocks, 1 command"],
    )?;
    ensure!(bench.guest.ok(&sum(&e, 1))? == from, "the copy differs");
    ensure!(
        bench.guest.ok(&sum(&e, 0))? == empty,
        "and changed other data"
    );

    // All variants of SANITIZE and FORMAT UNIT, and the resulting data. A format without a pattern preserves data.
    for (way, left) in [
        ("sg_sanitize -B", "\0\0\0\0"),
        ("sg_sanitize -O -p /tmp/y", "yyyy"),
        ("sg_format -F", "yyyy"),
        ("sg_format -F -I", "\0\0\0\0"),
        ("sg_sanitize -O -p /tmp/y", "yyyy"),
        ("sg_sanitize -C", "\0\0\0\0"),
    ] {
        bench.expect(&format!("{way} -Q -e SE"), 0, &[])?;
        bench.guest.ok(&format!(
            "n=0; until sg_turs {e} >/dev/null 2>&1; do n=$((n+1)); [ $n -lt 100 ] || exit 1; sleep 0.1; done"
        ))?;
        for skip in [0, 512, 16383] {
            let found = bench.guest.ok(&format!(
                "dd if={e} bs=4096 skip={skip} count=1 iflag=direct 2>/dev/null | head -c 4"
            ))?;
            ensure!(found == left, "after {way} block {skip} holds {found:?}");
        }
    }
    kernel_is_content(&mut bench.guest)?;
    let file = std::fs::read(bench.rig.scratch.file("d.raw"))?;
    ensure!(file[5 * 512..6 * 512] == [b'y'; 512], "the host's file");
    Ok(())
}

#[test]
fn reservations_resets_and_port_groups_have_their_effect() -> Result<()> {
    let mut bench = Bench::new("sg3-effects")?;
    bench.expect(
        "sg_persist -n -c D",
        0,
        &[
            "(ATP_C): 1",
            "(PTPL_C): 1",
            "Exclusive Access, all registrants: 1",
        ],
    )?;
    bench.expect("sg_persist -n -o -G -S 0xabc D", 0, &[])?;
    bench.expect(
        "sg_persist -n -k D",
        0,
        &["1 registered reservation key follows: 0xabc"],
    )?;
    bench.expect("sg_persist -n -o -R -K 0xabc -T 5 D", 0, &[])?;
    bench.expect(
        "sg_persist -n -r D",
        0,
        &["Key=0xabc scope: LU_SCOPE, type: Write Exclusive, registrants only"],
    )?;
    bench.expect("sg_persist -n -s D", 0, &["<< Reservation holder >>"])?;
    // A wrong key causes a conflict, the right one releases.
    bench.expect(
        "sg_persist -n -o -L -K 0xabd -T 5 D",
        RESERVATION_CONFLICT,
        &[],
    )?;
    bench.expect("sg_persist -n -o -L -K 0xabc -T 5 D", 0, &[])?;
    bench.expect("sg_persist -n -r D", 0, &["there is NO reservation held"])?;
    bench.expect("sg_persist -n -o -C -K 0xabc D", 0, &[])?;
    bench.expect(
        "sg_persist -n -k D",
        0,
        &["there are NO registered reservation keys"],
    )?;

    // A unit reset causes one unit attention, on this disk only.
    bench.expect("sg_reset -d SD", 0, &[])?;
    bench.expect(
        "sg_turs SD",
        UNIT_ATTENTION,
        &["Bus device reset function occurred"],
    )?;
    bench.expect("sg_turs SD", 0, &[])?;
    bench.expect("sg_turs SE", 0, &[])?;

    bench.expect("sg_rtpg -d D", 0, &["state : 0x00 (active/optimized)"])?;
    bench.expect(
        "sg_stpg -s SD",
        0,
        &["Set asymmetric access state to (standby)"],
    )?;
    bench.expect(
        "sg_rtpg -d SD",
        0,
        &[
            "state : 0x02 (standby)",
            "status code : 0x01 (target port asym. state changed by SET TARGET PORT GROUPS command)",
        ],
    )?;
    bench.expect("sg_turs SD", NOT_READY, &["not ready"])?;
    bench.expect(
        "sg_stpg -o SD",
        0,
        &["Set asymmetric access state to (active/optimized)"],
    )?;
    bench.expect("sg_turs SD", 0, &[])?;
    let d = bench.file[0].trim_start_matches("/dev/").to_owned();
    bench
        .guest
        .io_ok(&format!("soak --file /dev/{d} --runtime 1"))?;
    bench.rig.daemon.process().check_running()
}
