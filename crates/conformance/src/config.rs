//! Configuration space of virtio-blk (virtio 1.3, 5.2.4).

use vhost_frontend::{Error, FrontEnd, Options, protocol_feature, request};

use crate::{Devices, Target, Test, Verdict, equal, failed, needs};

/// Size of the configuration space, without the fields of zoned devices.
const SIZE: u32 = 60;

/// Feature bits (5.2.3).
pub(crate) mod bit {
    pub const SIZE_MAX: u64 = 1 << 1;
    pub const SEG_MAX: u64 = 1 << 2;
    pub const RO: u64 = 1 << 5;
    pub const BLK_SIZE: u64 = 1 << 6;
    pub const FLUSH: u64 = 1 << 9;
    pub const TOPOLOGY: u64 = 1 << 10;
    pub const CONFIG_WCE: u64 = 1 << 11;
    pub const MQ: u64 = 1 << 12;
    pub const DISCARD: u64 = 1 << 13;
    pub const WRITE_ZEROES: u64 = 1 << 14;
}

const fn test(title: &'static str, clause: &'static str, run: fn(&Target) -> Verdict) -> Test {
    Test::new("config", Devices::Blk, title, clause, run)
}

pub(crate) const TESTS: &[Test] = &[
    test(
        "the capacity can be read",
        "virtio 1.3, 5.2.4: capacity",
        |target| {
            let (_, config) = open(target)?;
            equal(
                "a capacity of at least 8 sectors",
                config.capacity >= 8,
                true,
            )
        },
    ),
    test(
        "parts have the bytes of the whole",
        "vhost-user: VHOST_USER_GET_CONFIG",
        |target| {
            let (front_end, config) = open(target)?;
            for (offset, length) in [(0, 1), (0, 8), (20, 4), (32, 1), (34, 2)] {
                let part = front_end.config(offset, length)?;
                let whole = &config.bytes[offset as usize..(offset + length) as usize];
                equal(&format!("{length} bytes at {offset}"), &part[..], whole)?;
            }
            Ok(())
        },
    ),
    test(
        "a read beyond the end fails without bytes",
        "vhost-user: VHOST_USER_GET_CONFIG",
        |target| {
            let (front_end, _) = open(target)?;
            match front_end.config(250, 100) {
                Err(Error::Answer { .. } | Error::Closed) => Ok(()),
                Err(other) => Err(other.into()),
                Ok(bytes) => failed(format!("expected no bytes, got {}", bytes.len())),
            }
        },
    ),
    test(
        "blk_size is a power of two from 512",
        "virtio 1.3, 5.2.4: blk_size",
        |target| {
            let (front_end, config) = open(target)?;
            needs(
                front_end.offered() & bit::BLK_SIZE != 0,
                "VIRTIO_BLK_F_BLK_SIZE",
            )?;
            let size = config.word(20);
            let is_valid = size >= 512 && size.is_power_of_two();
            equal(&format!("blk_size {size} is valid"), is_valid, true)?;
            let sectors = u64::from(size / 512);
            equal(
                "rest of the capacity in blocks",
                config.capacity % sectors,
                0,
            )
        },
    ),
    test(
        "topology fields are multiples of blk_size",
        "virtio 1.3, 5.2.4: topology",
        |target| {
            let (front_end, config) = open(target)?;
            needs(
                front_end.offered() & bit::TOPOLOGY != 0,
                "VIRTIO_BLK_F_TOPOLOGY",
            )?;
            let (exponent, offset) = (config.bytes[24], config.bytes[25]);
            equal("physical_block_exp is at most 16", exponent <= 16, true)?;
            let lowest = u32::from(offset) < 1 << exponent.min(16);
            equal("alignment_offset is below a physical block", lowest, true)
        },
    ),
    test(
        "seg_max and size_max are not zero",
        "virtio 1.3, 5.2.4: size_max, seg_max",
        |target| {
            let (front_end, config) = open(target)?;
            let fields = [
                (bit::SIZE_MAX, 8, "size_max"),
                (bit::SEG_MAX, 12, "seg_max"),
            ];
            for (bit, at, name) in fields {
                if front_end.offered() & bit != 0 {
                    equal(&format!("{name} is above 0"), config.word(at) > 0, true)?;
                }
            }
            Ok(())
        },
    ),
    test(
        "num_queues is the number of queues",
        "virtio 1.3, 5.2.4: num_queues",
        |target| {
            let (front_end, config) = open(target)?;
            needs(front_end.offered() & bit::MQ != 0, "VIRTIO_BLK_F_MQ")?;
            let queues = u16::from_le_bytes([config.bytes[34], config.bytes[35]]);
            let has_count = front_end.has_protocol(protocol_feature::MQ);
            needs(has_count, "VHOST_USER_PROTOCOL_F_MQ")?;
            let at_most = queues >= 1 && queues <= front_end.queue_count();
            equal(&format!("num_queues {queues} is served"), at_most, true)
        },
    ),
    test(
        "discard and write zeroes have limits",
        "virtio 1.3, 5.2.4: max_discard_seg, max_write_zeroes_seg",
        |target| {
            let (front_end, config) = open(target)?;
            let fields = [
                (bit::DISCARD, 36, "max_discard_sectors"),
                (bit::DISCARD, 40, "max_discard_seg"),
                (bit::WRITE_ZEROES, 48, "max_write_zeroes_sectors"),
                (bit::WRITE_ZEROES, 52, "max_write_zeroes_seg"),
            ];
            let any = bit::DISCARD | bit::WRITE_ZEROES;
            needs(front_end.offered() & any != 0, "VIRTIO_BLK_F_DISCARD")?;
            for (bit, at, name) in fields {
                if front_end.offered() & bit != 0 {
                    equal(&format!("{name} is above 0"), config.word(at) > 0, true)?;
                }
            }
            Ok(())
        },
    ),
    test(
        "writeback can be changed and read",
        "virtio 1.3, 5.2.5.2: VIRTIO_BLK_F_CONFIG_WCE",
        |target| {
            let (front_end, config) = open(target)?;
            let has_wce = front_end.has(bit::CONFIG_WCE);
            needs(has_wce, "VIRTIO_BLK_F_CONFIG_WCE")?;
            let before = config.bytes[32];
            for value in [0, 1, before] {
                front_end.write_config(32, &[value])?;
                equal("writeback", Config::read(&front_end)?.bytes[32], value)?;
            }
            Ok(())
        },
    ),
    test(
        "the capacity cannot be written",
        "virtio 1.3, 5.2.4: capacity",
        |target| {
            let (front_end, config) = open(target)?;
            let _refused = front_end.write_config(0, &(config.capacity + 8).to_le_bytes());
            drop(front_end);
            let (_, after) = open(target)?;
            equal("capacity", after.capacity, config.capacity)
        },
    ),
    test(
        "messages with a wrong length change nothing",
        "vhost-user: VHOST_USER_SET_CONFIG",
        |target| {
            let (front_end, config) = open(target)?;
            // Announces eight bytes and has one.
            let payload = [0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 1];
            let _refused = front_end.acknowledged(request::SET_CONFIG, &payload, &[]);
            drop(front_end);
            let (_, after) = open(target)?;
            equal("capacity", after.capacity, config.capacity)
        },
    ),
];

/// Contents of the configuration space.
pub(crate) struct Config {
    bytes: Vec<u8>,
    /// Capacity in sectors of 512 bytes.
    pub capacity: u64,
}

impl Config {
    /// Reads the whole space. A back end may offer fewer bytes than the newest standard has.
    pub fn read(front_end: &FrontEnd) -> Verdict<Config> {
        let is_offered = front_end.has_protocol(protocol_feature::CONFIG);
        needs(is_offered, "VHOST_USER_PROTOCOL_F_CONFIG")?;
        let bytes = front_end.config(0, SIZE)?;
        let mut capacity = [0; 8];
        capacity.copy_from_slice(&bytes[..8]);
        Ok(Config {
            capacity: u64::from_le_bytes(capacity),
            bytes,
        })
    }

    /// Returns the 32-bit field at an offset.
    pub fn word(&self, at: usize) -> u32 {
        let bytes = &self.bytes[at..at + 4];
        u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }
}

fn open(target: &Target) -> Verdict<(FrontEnd, Config)> {
    let front_end = target.connect(&Options::default())?;
    let config = Config::read(&front_end)?;
    Ok((front_end, config))
}
