//! Memory regions: added, removed and replaced while rings run.

use vhost_frontend::{Area, FrontEnd, Message, Options, Queue, QueueOptions, protocol_feature};
use vhost_user_wire::Reply;

use crate::io::{BLOCK, LIMIT};
use crate::{Device, Devices, Target, Test, Verdict, equal, failed, needs};

const MIB: usize = 1 << 20;

const fn test(title: &'static str, clause: &'static str, run: fn(&Target) -> Verdict) -> Test {
    Test::new("memory", Devices::Any, title, clause, run)
}

pub(crate) const TESTS: &[Test] = &[
    test(
        "there is at least one memory slot",
        "vhost-user: VHOST_USER_GET_MAX_MEM_SLOTS",
        |target| {
            let driver = Driver::with_slots(target)?;
            let slots = driver.front_end.channel().ask(Message::GetMaxMemSlots)?;
            match slots {
                Reply::U64(1..) => Ok(()),
                other => failed(format!("expected at least 1 slot, got {other:?}")),
            }
        },
    ),
    test(
        "regions are added and removed while a ring runs",
        "vhost-user: VHOST_USER_ADD_MEM_REG, VHOST_USER_REM_MEM_REG",
        |target| {
            let mut driver = Driver::with_slots(target)?;
            for _ in 0..20 {
                let region = driver.front_end.add_region(MIB)?;
                driver.read(&[region.part(0, driver.length)])?;
                driver.front_end.remove_region(region.address)?;
                let old = driver.old.clone();
                driver.read(&[old])?;
            }
            Ok(())
        },
    ),
    test(
        "several regions are in use at once",
        "vhost-user: VHOST_USER_ADD_MEM_REG",
        |target| {
            let mut driver = Driver::with_slots(target)?;
            let regions: Vec<_> = (0..6)
                .map(|_| driver.front_end.add_region(MIB))
                .collect::<Result<_, _>>()?;
            for region in &regions {
                driver.read(&[region.part(BLOCK, driver.length)])?;
            }
            let half = driver.length / 2;
            driver.read(&[regions[5].part(0, half), regions[0].part(0, half)])
        },
    ),
    test(
        "SET_MEM_TABLE replaces the table while a ring runs",
        "vhost-user: VHOST_USER_SET_MEM_TABLE",
        |target| {
            let mut driver = Driver::new(target)?;
            for _ in 0..5 {
                let region = driver.front_end.memory_mut().add(MIB)?.area();
                driver.front_end.send_memory()?;
                driver.read(&[region.part(0, driver.length)])?;
                drop(driver.front_end.memory_mut().take(region.address));
                driver.front_end.send_memory()?;
                let old = driver.old.clone();
                driver.read(&[old])?;
            }
            Ok(())
        },
    ),
    test(
        "a buffer may cross the border of two regions",
        "virtio 1.3, 2.7.5: addr, len",
        |target| {
            let mut driver = Driver::new(target)?;
            let first = driver.front_end.memory_mut().add(MIB)?.area();
            let second = driver.front_end.memory_mut().add(MIB)?.area();
            equal(
                "second region follows",
                second.address,
                first.address + MIB as u64,
            )?;
            driver.front_end.send_memory()?;
            let half = driver.length / 2;
            let (left, right) = (first.part(MIB - half, half), second.part(0, half));
            let one_descriptor = (left.address, driver.length as u32);
            driver.read_by(&[one_descriptor], &[left, right])
        },
    ),
];

/// A request queue with one request: a read of 4096 bytes, or INQUIRY.
struct Driver {
    front_end: FrontEnd,
    queue: Queue,
    device: Device,
    small: Area,
    /// Data area in the first region.
    old: Area,
    length: usize,
}

impl Driver {
    fn new(target: &Target) -> Verdict<Driver> {
        let mut front_end = target.connect(&Options::default())?;
        let queue = front_end.start_queue(target.first_queue(), &QueueOptions::default())?;
        let length = match target.device {
            Device::Blk => BLOCK,
            Device::Scsi(..) => 36,
        };
        Ok(Driver {
            small: front_end.allocate(BLOCK, BLOCK as u64)?,
            old: front_end.allocate(length, BLOCK as u64)?,
            front_end,
            queue,
            device: target.device,
            length,
        })
    }

    fn with_slots(target: &Target) -> Verdict<Driver> {
        let driver = Driver::new(target)?;
        let offered = driver
            .front_end
            .has_protocol(protocol_feature::CONFIGURE_MEM_SLOTS);
        needs(offered, "VHOST_USER_PROTOCOL_F_CONFIGURE_MEM_SLOTS")?;
        Ok(driver)
    }

    /// Runs the request with data in these areas.
    fn read(&mut self, areas: &[Area]) -> Verdict {
        let elements: Vec<_> = areas.iter().map(Area::element).collect();
        self.read_by(&elements, areas)
    }

    /// Runs the request twice, over different bytes, and checks that each byte of the areas was written.
    fn read_by(&mut self, elements: &[(u64, u32)], areas: &[Area]) -> Verdict {
        let mut data_over = |fill: u8| -> Verdict<Vec<u8>> {
            for area in areas {
                area.write(0, &vec![fill; area.length]);
            }
            self.submit(elements)?;
            let mut data = Vec::new();
            for area in areas {
                let mut part = vec![0; area.length];
                area.read(0, &mut part);
                data.extend(part);
            }
            Ok(data)
        };
        let (first, second) = (data_over(0xee)?, data_over(0x11)?);
        let differs = first
            .iter()
            .zip(&second)
            .position(|(one, other)| one != other);
        equal("first byte that was not written", differs, None)?;
        match self.device {
            Device::Blk => Ok(()),
            Device::Scsi(..) => equal("peripheral device type", first[0] & 0x1f, 0),
        }
    }

    fn submit(&mut self, data: &[(u64, u32)]) -> Verdict {
        let mut header = [0; 51];
        let mut writable = data.to_vec();
        let (request, response) = match self.device {
            Device::Blk => (16, self.small.part(1024, 1)),
            Device::Scsi(target, lun) => {
                let [high, low] = lun.to_be_bytes();
                header[..4].copy_from_slice(&[1, target, 0x40 | high, low]);
                header[19..25].copy_from_slice(&[0x12, 0, 0, 0, 36, 0]);
                (51, self.small.part(1024, 108))
            }
        };
        match self.device {
            Device::Blk => writable.push(response.element()),
            Device::Scsi(..) => writable.insert(0, response.element()),
        }
        self.small.write(0, &header);
        response.write(0, &vec![0xff; response.length]);
        let readable = [self.small.part(0, request).element()];
        if !self.queue.add(&readable, &writable, 0) {
            return failed("the test's chain does not fit in the ring");
        }
        self.queue.publish();
        self.queue.wait(LIMIT)?;
        self.queue.pop_used();
        let at = if request == 16 { 1024 } else { 1024 + 11 };
        let mut status = [0xff];
        self.small.read(at, &mut status);
        equal("status of the request", status, [0])
    }
}
