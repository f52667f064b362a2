//! Descriptions of published studies: set-up, commands that replay them, and findings. All data, no code.

/// A published study.
pub struct PublishedStudy {
    /// Name on the command line.
    pub name: &'static str,
    pub title: &'static str,
    /// Author, year and address.
    pub source: &'static str,
    pub topology: &'static str,
    pub preparation: &'static str,
    pub workload: &'static str,
    /// Differences between the study and its replay.
    pub differences: &'static str,
    pub parts: &'static [Part],
    pub findings: &'static [Finding],
}

/// A command of a replay.
pub struct Part {
    /// Folder of the results.
    pub folder: &'static str,
    /// Words after `lunette vm`, without the folder. `{jobs}` is the folder of the job files.
    pub words: &'static str,
    /// Words for `--quick`.
    pub quick: &'static str,
}

/// A finding, and the result that corresponds to it.
pub struct Finding {
    pub published: &'static str,
    /// Folder of a part.
    pub part: &'static str,
    pub measure: Measure,
}

/// Value of a replay.
pub enum Measure {
    /// IOPS of `way` relative to those of `base`, in each case with a name that begins with `case`.
    Ratio {
        way: &'static str,
        base: &'static str,
        case: &'static str,
    },
    /// Mean time of a layer as a share of the application's latency.
    Layer(&'static str),
    /// Bandwidth of a number of connections relative to one.
    Connections(u16),
}

/// Job files that the commands use.
pub const JOBS: [(&str, &str); 1] = [(
    "four-disks.fio",
    include_str!("../../../../../contrib/jobs/four-disks.fio"),
)];

pub const STUDIES: [PublishedStudy; 5] =
    [LATENCY, BARE_METAL, FOUR_DISKS, FIFTEEN_CASES, CONNECTIONS];

const LATENCY: PublishedStudy = PublishedStudy {
    name: "latency",
    title: "Latency of virtio-blk by layer",
    source: "Stefan Hajnoczi, 2010, https://www.linux-kvm.org/page/Virtio/Block/Latency",
    topology: "one virtual CPU, one virtio-blk disk of QEMU; then the same disk through Lunette without polling",
    preparation: "the disk is written once; each layer is measured in a separate run, with the application's latency as control",
    workload: "sequential reads of 4 KiB with O_DIRECT, one in flight",
    differences: "The study used a device of the host; this is a file. --block of `lunette vm latency` measures a device.",
    parts: &[
        Part {
            folder: "qemu",
            words: "latency --device qemu --transport blk --rw read --time 10 --size 512M",
            quick: "latency --device qemu --transport blk --rw read --time 2 --size 64M",
        },
        Part {
            folder: "lunette",
            words: "latency --device lunette --polling no --transport blk --rw read --time 10 --size 512M",
            quick: "latency --device lunette --polling no --transport blk --rw read --time 2 --size 64M",
        },
    ],
    findings: &[
        Finding {
            published: "virtio-pci and below: 170.8 of 196.5 us (87 %)",
            part: "qemu",
            measure: Measure::Layer("Guest virtio-pci"),
        },
        Finding {
            published: "KVM and below: 163.3 us (83 %)",
            part: "qemu",
            measure: Measure::Layer("Host kvm"),
        },
        Finding {
            published: "QEMU's virtio device and below: 159.6 us (81 %)",
            part: "qemu",
            measure: Measure::Layer("Device"),
        },
        Finding {
            published: "QEMU's I/O on the host: 130.2 us (66 %)",
            part: "qemu",
            measure: Measure::Layer("Block device"),
        },
        Finding {
            published: "the same reads on the host without a guest: 128.9 us (66 %)",
            part: "qemu",
            measure: Measure::Layer("Host, no guest"),
        },
        Finding {
            published: "QEMU's virtio device and below: 159.6 us (81 %); here Lunette's device",
            part: "lunette",
            measure: Measure::Layer("Device"),
        },
    ],
};

const BARE_METAL: PublishedStudy = PublishedStudy {
    name: "bare-metal",
    title: "File systems in guests and on bare metal",
    source: "Khoa Huynh and Stefan Hajnoczi, 2010, https://wiki.qemu.org/Features/VirtioIoeventfd",
    topology: "one guest; a disk each through QEMU's virtio-blk with and without ioeventfd, with an I/O thread, and through Lunette; the host without a guest",
    preparation: "ext4 is created on each disk and mounted with and without barriers",
    workload: "creation of files, sequential and random reads, random writes, and a mail server, with 1, 8 and 16 threads",
    differences: "The study used FFSB on an array of disks. These loads are similar; files are smaller, and a disk is a file of the folder.",
    parts: &[
        Part {
            folder: "create",
            words: "compare --preset create --threads 1,8,16 --turns 8 --turn-time 10 --size 4G --smp 4",
            quick: "compare --preset create --threads 1,8 --barriers on --turns 4 --turn-time 0.3 --size 64M --ways ioeventfd,QEMU,Lunette",
        },
        Part {
            folder: "seqread",
            words: "compare --preset seqread --threads 1,8,16 --barriers on --turns 8 --turn-time 10 --size 4G --smp 4",
            quick: "compare --preset seqread --threads 1,8 --barriers on --turns 4 --turn-time 0.3 --size 64M --ways virtio-blk",
        },
        Part {
            folder: "randread",
            words: "compare --preset randread --threads 1,8,16 --barriers on --turns 8 --turn-time 10 --size 4G --smp 4",
            quick: "compare --preset randread --threads 1,8 --barriers on --turns 4 --turn-time 0.3 --size 64M --ways virtio-blk",
        },
        Part {
            folder: "randwrite",
            words: "compare --preset randwrite --threads 1,8,16 --turns 8 --turn-time 10 --size 4G --smp 4",
            quick: "",
        },
        Part {
            folder: "mail",
            words: "compare --preset mail --threads 1,8,16 --turns 8 --turn-time 10 --size 4G --smp 4",
            quick: "",
        },
    ],
    findings: &[
        Finding {
            published: "ioeventfd increases the throughput of virtio-blk, most of all with several threads",
            part: "create",
            measure: Measure::Ratio {
                way: "QEMU virtio-blk",
                base: "QEMU virtio-blk, ioeventfd=off",
                case: "create",
            },
        },
        Finding {
            published: "the same for sequential reads",
            part: "seqread",
            measure: Measure::Ratio {
                way: "QEMU virtio-blk",
                base: "QEMU virtio-blk, ioeventfd=off",
                case: "seqread",
            },
        },
        Finding {
            published: "the same for random reads",
            part: "randread",
            measure: Measure::Ratio {
                way: "QEMU virtio-blk",
                base: "QEMU virtio-blk, ioeventfd=off",
                case: "randread",
            },
        },
        Finding {
            published: "no published figure in this program: share of bare metal, here of Lunette's virtio-blk",
            part: "randread",
            measure: Measure::Ratio {
                way: "Lunette virtio-blk",
                base: "host, no guest",
                case: "randread",
            },
        },
    ],
};

const FOUR_DISKS: PublishedStudy = PublishedStudy {
    name: "four-disks",
    title: "virtio-scsi and virtio-blk with four disks",
    source: "Wanlong Gao, 2012, https://github.com/gaowanlong (notes on the performance of virtio-scsi)",
    topology: "four virtual CPUs; four SCSI targets of one LUN, one target of four LUNs, four virtio-blk disks, all of QEMU with four queues; then of Lunette",
    preparation: "disks of 700 MB in memory, written once; the study also kept the host's CPUs from sleeping (idle=poll), as --idle-poll of `lunette vm matrix` does",
    workload: "contrib/jobs/four-disks.fio: random reads and writes of 4 to 64 KiB, four in flight in all",
    differences: "The job runs for a fixed time in each turn instead of 100 loops. Each layout has disks of its own, which take up to 8.4 GB of memory without --quick.",
    parts: &[
        Part {
            folder: "layouts",
            words: "matrix --job {jobs}/four-disks.fio --layouts blk,scsi,luns --disks 4 --queues 4 --smp 4 --threads 0 --series QEMU --memory --size 700M --turns 8 --turn-time 30",
            quick: "matrix --job {jobs}/four-disks.fio --layouts blk,scsi,luns --disks 4 --queues 4 --smp 4 --threads 0 --series QEMU --memory --size 16M --turns 6 --turn-time 1",
        },
        Part {
            folder: "queues",
            words: "matrix --job {jobs}/four-disks.fio --layouts scsi --disks 4 --queues 1,4 --smp 4 --threads 0 --series QEMU --memory --size 700M --turns 8 --turn-time 30",
            quick: "matrix --job {jobs}/four-disks.fio --layouts scsi --disks 4 --queues 1,4 --smp 4 --threads 0 --series QEMU --memory --size 16M --turns 6 --turn-time 1",
        },
        Part {
            folder: "descriptors",
            words: "matrix --job {jobs}/four-disks.fio --layouts scsi --disks 4 --chained --queues 4 --smp 4 --threads 0 --series QEMU --memory --size 700M --turns 8 --turn-time 30",
            quick: "matrix --job {jobs}/four-disks.fio --layouts scsi --disks 4 --chained --queues 4 --smp 4 --threads 0 --series QEMU --memory --size 16M --turns 6 --turn-time 1",
        },
        Part {
            folder: "lunette",
            words: "matrix --job {jobs}/four-disks.fio --layouts blk,scsi,luns --disks 4 --queues 4 --smp 4 --threads 0 --series Lunette --memory --size 700M --turns 8 --turn-time 30",
            quick: "matrix --job {jobs}/four-disks.fio --layouts blk,scsi,luns --disks 4 --queues 4 --smp 4 --threads 0 --series Lunette --memory --size 16M --turns 6 --turn-time 1",
        },
    ],
    findings: &[
        Finding {
            published: "four targets have 62 % of the bandwidth of virtio-blk (reads 248 of 404 MB/s, writes 248 of 395 MB/s)",
            part: "layouts",
            measure: Measure::Ratio {
                way: "QEMU scsi, main loop",
                base: "QEMU blk, main loop",
                case: "four-disks",
            },
        },
        Finding {
            published: "no published figure in this program: one target of four LUNs and four targets",
            part: "layouts",
            measure: Measure::Ratio {
                way: "QEMU scsi LUNs, main loop",
                base: "QEMU scsi, main loop",
                case: "four-disks",
            },
        },
        Finding {
            published: "several queues increase the bandwidth of virtio-scsi by about 50 %",
            part: "queues",
            measure: Measure::Ratio {
                way: "QEMU scsi, main loop, 4 queues",
                base: "QEMU scsi, main loop, 1 queue",
                case: "four-disks",
            },
        },
        Finding {
            published: "chained descriptors have 97 % of the bandwidth (reads 242 of 248 MB/s, writes 239 of 248 MB/s)",
            part: "descriptors",
            measure: Measure::Ratio {
                way: "QEMU scsi, main loop, chained",
                base: "QEMU scsi, main loop",
                case: "four-disks",
            },
        },
        Finding {
            published: "four targets have 62 % of the bandwidth of virtio-blk; here Lunette's devices",
            part: "lunette",
            measure: Measure::Ratio {
                way: "Lunette scsi, shared workers",
                base: "Lunette blk, shared workers",
                case: "four-disks",
            },
        },
    ],
};

const FIFTEEN_CASES: PublishedStudy = PublishedStudy {
    name: "fifteen-cases",
    title: "virtio-blk and virtio-scsi in fifteen cases",
    source: "Martin Polednik, 2017, https://mpolednik.github.io/2017/01/23/virtio-blk-vs-virtio-scsi/",
    topology: "eight disks of one guest through QEMU's virtio-blk and virtio-scsi, with 0, 1, 4 and 8 I/O threads",
    preparation: "files of 2 GB in the folder, written once; the study had them on NFS: use a --folder on NFS",
    workload: "contrib/jobs/eight-disks.fio: requests of 4 KiB; reads, mixtures with 25, 50 and 75 % writes, writes; 1, 4 and 8 in flight for each disk",
    differences: "A virtio-scsi controller of QEMU has one I/O thread before QEMU 10.0, so the series with 4 and 8 threads are those of virtio-blk.",
    parts: &[Part {
        folder: "cases",
        words: "matrix --disks 8 --threads 0,1,4,8 --series QEMU --smp 4 --size 2G --turns 6 --turn-time 30",
        quick: "matrix --disks 8 --threads 0,4 --series QEMU --smp 2 --size 16M --turns 4 --turn-time 0.2",
    }],
    findings: &[
        Finding {
            published: "reads, depth 1: virtio-scsi has about 75 % of virtio-blk",
            part: "cases",
            measure: SCSI_TO_BLK_1,
        },
        Finding {
            published: "reads, depth 4: virtio-scsi is slightly ahead",
            part: "cases",
            measure: SCSI_TO_BLK_4,
        },
        Finding {
            published: "reads, depth 8: virtio-scsi is slightly ahead",
            part: "cases",
            measure: SCSI_TO_BLK_8,
        },
        Finding {
            published: "75 % writes: virtio-blk is ahead by 2 to 25 %",
            part: "cases",
            measure: Measure::Ratio {
                way: "QEMU blk, main loop",
                base: "QEMU scsi, main loop",
                case: "25/75",
            },
        },
        Finding {
            published: "writes: no significant difference",
            part: "cases",
            measure: Measure::Ratio {
                way: "QEMU scsi, main loop",
                base: "QEMU blk, main loop",
                case: "randwrite",
            },
        },
        Finding {
            published: "no number of I/O threads is best in general; more threads reduce the IOPS of mixtures",
            part: "cases",
            measure: Measure::Ratio {
                way: "QEMU blk, 4 iothreads",
                base: "QEMU blk, main loop",
                case: "75/25",
            },
        },
    ],
};

const SCSI_TO_BLK_1: Measure = scsi_to_blk("randread, depth 1");
const SCSI_TO_BLK_4: Measure = scsi_to_blk("randread, depth 4");
const SCSI_TO_BLK_8: Measure = scsi_to_blk("randread, depth 8");

const fn scsi_to_blk(case: &'static str) -> Measure {
    Measure::Ratio {
        way: "QEMU scsi, main loop",
        base: "QEMU blk, main loop",
        case,
    }
}

const CONNECTIONS: PublishedStudy = PublishedStudy {
    name: "connections",
    title: "Several connections in an iSCSI session (MC/S)",
    source: "Linux-IO project, 2009, http://www.linux-iscsi.org/wiki/KVM",
    topology: "two guests: a target with a RAM disk of 64 commands, an initiator; a network of 10 Gbit/s with packets of 9,000 bytes",
    preparation: "the login requests MaxRecvDataSegmentLength=131072, MaxBurstLength=262144, FirstBurstLength=65536, ImmediateData=Yes, InitialR2T=Yes; the disk is written once",
    workload: "disktest -K64 -B262144 -ID -PTX -T60: requests of 256 KiB, 64 in flight; reads, writes and both",
    differences: "The study assigned network cards to the guests. Here a socket between the QEMUs is the cable, and Lunette is target and initiator.",
    parts: &[Part {
        folder: "mcs",
        words: "mcs --connections 4 --size-mib 512 --repetitions 6 --turn-ms 60000",
        quick: "mcs --connections 4 --size-mib 64 --repetitions 4 --turn-ms 1000",
    }],
    findings: &[
        Finding {
            published: "no published figure in this program: two connections relative to one",
            part: "mcs",
            measure: Measure::Connections(2),
        },
        Finding {
            published: "no published figure in this program: four connections relative to one",
            part: "mcs",
            measure: Measure::Connections(4),
        },
    ],
};
