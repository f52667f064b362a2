//! A session: features agreed on, memory shared, vrings set up and stopped, configuration read and written.
//!
//! Every request that can be is acknowledged, so that a refusal is seen where it happens.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;

use guest_memory::{MemoryTable, RegionSpec};
use virtqueue::driver::RingLayout;

use crate::memory::{Area, Memory};
use crate::queue::{Queue, QueueOptions};
use crate::{Channel, Error, Result, request};

/// Feature bits of the transport and the rings.
pub mod feature {
    #![allow(missing_docs)]
    pub const INDIRECT_DESC: u64 = 1 << 28;
    pub const EVENT_IDX: u64 = 1 << 29;
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    pub const VERSION_1: u64 = 1 << 32;
    pub const RING_PACKED: u64 = 1 << 34;
}

/// Feature bits of the vhost-user protocol.
pub mod protocol_feature {
    #![allow(missing_docs)]
    pub const MQ: u64 = 1 << 0;
    pub const REPLY_ACK: u64 = 1 << 3;
    pub const BACKEND_REQ: u64 = 1 << 5;
    pub const CONFIG: u64 = 1 << 9;
    pub const RESET_DEVICE: u64 = 1 << 13;
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
}

/// What a front end wants of its session.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Packed rings.
    pub packed: bool,
    /// `VIRTIO_F_EVENT_IDX`, if offered.
    pub event_idx: bool,
    /// Bits of the device type that are accepted, if offered.
    pub device_features: u64,
    /// Bytes of the first memory region.
    pub memory: usize,
    /// That region consists of huge pages, which the machine must have set aside.
    pub huge_pages: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            packed: false,
            event_idx: true,
            device_features: 0x00ff_ffff,
            memory: 32 << 20,
            huge_pages: false,
        }
    }
}

/// A connected front end.
pub struct FrontEnd {
    channel: Channel,
    memory: Memory,
    offered: u64,
    features: u64,
    queue_count: u16,
}

impl FrontEnd {
    /// Connects, agrees on features and shares the memory.
    pub fn connect(path: &Path, options: &Options) -> Result<FrontEnd> {
        FrontEnd::over(Channel::connect(path)?, options)
    }

    /// The same over a channel that is open already.
    pub fn over(channel: Channel, options: &Options) -> Result<FrontEnd> {
        let mut front_end = FrontEnd {
            channel,
            memory: Memory::new(options.memory, options.huge_pages)?,
            offered: 0,
            features: 0,
            queue_count: 1,
        };
        front_end.negotiate(options)?;
        front_end.send_memory()?;
        Ok(front_end)
    }

    fn negotiate(&mut self, options: &Options) -> Result<()> {
        use feature::{EVENT_IDX, INDIRECT_DESC, PROTOCOL_FEATURES, RING_PACKED, VERSION_1};
        use protocol_feature::{CONFIG, CONFIGURE_MEM_SLOTS, MQ, REPLY_ACK, RESET_DEVICE};
        let channel = &self.channel;
        channel.send(request::SET_OWNER, 0, &[], &[])?;
        self.offered = number(channel, request::GET_FEATURES)?;
        let mut wanted = VERSION_1 | PROTOCOL_FEATURES | INDIRECT_DESC | options.device_features;
        if options.event_idx {
            wanted |= EVENT_IDX;
        }
        if options.packed {
            wanted |= RING_PACKED;
        }
        self.features = self.offered & wanted;
        let offered = number(channel, request::GET_PROTOCOL_FEATURES)?;
        let protocol = offered & (MQ | REPLY_ACK | CONFIG | CONFIGURE_MEM_SLOTS | RESET_DEVICE);
        if protocol & REPLY_ACK == 0 {
            return Err(Error::Wrong("the back end does not offer REPLY_ACK".into()));
        }
        let payload = protocol.to_ne_bytes();
        channel.send(request::SET_PROTOCOL_FEATURES, 0, &payload, &[])?;
        if protocol & MQ != 0 {
            let count = number(channel, request::GET_QUEUE_NUM)?;
            self.queue_count = u16::try_from(count).unwrap_or(u16::MAX);
        }
        channel.acknowledged(request::SET_FEATURES, &self.features.to_ne_bytes(), &[])
    }

    /// The messages themselves.
    pub fn channel(&self) -> &Channel {
        &self.channel
    }

    /// Feature bits that the back end offers.
    pub fn offered(&self) -> u64 {
        self.offered
    }

    /// Feature bits agreed on.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Was a feature agreed on?
    pub fn has(&self, bit: u64) -> bool {
        self.features & bit != 0
    }

    /// Queues that the device has.
    pub fn queue_count(&self) -> u16 {
        self.queue_count
    }

    /// The guest's memory.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The guest's memory, to be changed behind the back end's back.
    pub fn memory_mut(&mut self) -> &mut Memory {
        &mut self.memory
    }

    /// The memory as the driver side of a ring wants it.
    pub fn table(&self) -> Result<Arc<MemoryTable>> {
        Ok(Arc::new(self.memory.table()?))
    }

    /// Hands out guest memory.
    pub fn allocate(&mut self, bytes: usize, alignment: u64) -> Result<Area> {
        self.memory.allocate(bytes, alignment)
    }

    /// Tells the back end all regions anew (`SET_MEM_TABLE`).
    pub fn send_memory(&self) -> Result<()> {
        let (payload, fds) = self.memory.payload();
        self.acknowledged(request::SET_MEM_TABLE, &payload, &fds)
    }

    /// Adds a region while everything runs (`ADD_MEM_REG`).
    pub fn add_region(&mut self, size: usize) -> Result<Area> {
        let region = self.memory.add(size)?;
        let area = region.area();
        let payload = single_region(region.payload());
        self.channel
            .acknowledged(request::ADD_MEM_REG, &payload, &[region.file.as_fd()])?;
        Ok(area)
    }

    /// Removes the region that starts at a guest-physical address (`REM_MEM_REG`).
    pub fn remove_region(&mut self, guest_address: u64) -> Result<()> {
        let Some(region) = self.memory.take(guest_address) else {
            return Err(Error::Wrong(format!("no region at {guest_address:#x}")));
        };
        let payload = single_region(region.payload());
        self.acknowledged(request::REM_MEM_REG, &payload, &[])
    }

    /// Reads the configuration space.
    pub fn config(&self, offset: u32, length: u32) -> Result<Vec<u8>> {
        let mut payload = config_header(offset, length);
        payload.resize(12 + length as usize, 0);
        let answer = self.channel.call(request::GET_CONFIG, &payload, &[])?;
        match answer.get(12..) {
            Some(bytes) if bytes.len() == length as usize => Ok(bytes.to_vec()),
            _ => Err(Error::Answer {
                request: request::GET_CONFIG,
                what: format!("{} bytes", answer.len()),
            }),
        }
    }

    /// Writes to the configuration space.
    pub fn write_config(&self, offset: u32, bytes: &[u8]) -> Result<()> {
        let mut payload = config_header(offset, bytes.len() as u32);
        payload.extend(bytes);
        self.acknowledged(request::SET_CONFIG, &payload, &[])
    }

    /// Sets a vring up and starts it.
    pub fn start_queue(&mut self, index: u16, options: &QueueOptions) -> Result<Queue> {
        let queue = self.place_queue(index, options)?;
        self.begin_queue(&queue, queue.base())?;
        Ok(queue)
    }

    /// Lays a ring out in memory, without a word to the back end.
    pub fn place_queue(&mut self, index: u16, options: &QueueOptions) -> Result<Queue> {
        Queue::place(self, index, options)
    }

    /// Tells the back end of a ring and starts it, from `base` on.
    pub fn begin_queue(&self, queue: &Queue, base: u32) -> Result<()> {
        let (call, kick) = (queue.call().as_fd(), queue.kick_fd().as_fd());
        self.begin_ring(queue.index(), queue.layout(), base, call, kick)
    }

    /// The same for a ring that the caller drives by itself.
    pub fn begin_ring(
        &self,
        index: u16,
        layout: &RingLayout,
        base: u32,
        call: BorrowedFd<'_>,
        kick: BorrowedFd<'_>,
    ) -> Result<()> {
        self.describe_ring(index, layout, base)?;
        self.set_call(index, Some(call))?;
        self.set_kick(index, Some(kick))?;
        self.enable(index, true)
    }

    /// Size, base and addresses of a ring.
    pub fn describe_queue(&self, queue: &Queue, base: u32) -> Result<()> {
        self.describe_ring(queue.index(), queue.layout(), base)
    }

    fn describe_ring(&self, index: u16, layout: &RingLayout, base: u32) -> Result<()> {
        self.acknowledged(
            request::SET_VRING_NUM,
            &state(index, u32::from(layout.size)),
            &[],
        )?;
        self.acknowledged(request::SET_VRING_BASE, &state(index, base), &[])?;
        let addresses = [
            layout.descriptor_area,
            layout.device_area,
            layout.driver_area,
        ];
        self.set_addresses(index, addresses.map(|address| self.user_address(address)))
    }

    /// Addresses of a ring in the front end's own space: descriptors, used, available.
    pub fn set_addresses(&self, index: u16, addresses: [u64; 3]) -> Result<()> {
        let mut payload = state(index, 0).to_vec();
        for address in addresses {
            payload.extend(address.to_ne_bytes());
        }
        payload.extend([0; 8]);
        self.acknowledged(request::SET_VRING_ADDR, &payload, &[])
    }

    /// A guest-physical address in the front end's own space; one outside of the memory is left as it is.
    pub fn user_address(&self, guest_address: u64) -> u64 {
        let regions = self.memory.regions().iter();
        let offset = |s: &RegionSpec| {
            guest_address
                .checked_sub(s.guest_address)
                .filter(|offset| *offset < s.size)
        };
        regions
            .filter_map(|r| offset(&r.spec).map(|offset| r.spec.user_address + offset))
            .next()
            .unwrap_or(guest_address)
    }

    /// Stops a vring; gives where it stands. What was in flight has been answered then.
    pub fn stop_queue(&self, index: u16) -> Result<u32> {
        let answer = self
            .channel
            .call(request::GET_VRING_BASE, &state(index, 0), &[])?;
        match answer[..] {
            [_, _, _, _, a, b, c, d] => Ok(u32::from_ne_bytes([a, b, c, d])),
            _ => Err(Error::Answer {
                request: request::GET_VRING_BASE,
                what: format!("{} bytes", answer.len()),
            }),
        }
    }

    /// Gives another interrupt, or none.
    pub fn set_call(&self, index: u16, fd: Option<BorrowedFd<'_>>) -> Result<()> {
        self.set_fd(request::SET_VRING_CALL, index, fd)
    }

    /// Gives another kick, or none: the ring is then looked at all the time.
    pub fn set_kick(&self, index: u16, fd: Option<BorrowedFd<'_>>) -> Result<()> {
        self.set_fd(request::SET_VRING_KICK, index, fd)
    }

    /// Gives another error notification, or none.
    pub fn set_error(&self, index: u16, fd: Option<BorrowedFd<'_>>) -> Result<()> {
        self.set_fd(request::SET_VRING_ERR, index, fd)
    }

    fn set_fd(&self, request: u32, index: u16, fd: Option<BorrowedFd<'_>>) -> Result<()> {
        const NO_FD: u64 = 1 << 8;
        let payload = u64::from(index) | if fd.is_none() { NO_FD } else { 0 };
        self.acknowledged(request, &payload.to_ne_bytes(), fd.as_slice())
    }

    /// Lets a vring take requests, or not.
    pub fn enable(&self, index: u16, enabled: bool) -> Result<()> {
        let payload = state(index, u32::from(enabled));
        self.acknowledged(request::SET_VRING_ENABLE, &payload, &[])
    }

    /// Resets the device; everything is to be set up again.
    pub fn reset_device(&self) -> Result<()> {
        self.acknowledged(request::RESET_DEVICE, &[], &[])
    }

    /// Any request that is only acknowledged.
    pub fn acknowledged(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.channel.acknowledged(request, payload, fds)
    }
}

/// Payload of the vring state messages: index and number.
pub(crate) fn state(index: u16, number: u32) -> [u8; 8] {
    let mut payload = [0; 8];
    payload[..4].copy_from_slice(&u32::from(index).to_ne_bytes());
    payload[4..].copy_from_slice(&number.to_ne_bytes());
    payload
}

/// Padding, then the region.
fn single_region(region: [u8; 32]) -> Vec<u8> {
    [&[0; 8][..], &region].concat()
}

/// Offset, size, flags (0: by the driver).
fn config_header(offset: u32, length: u32) -> Vec<u8> {
    [offset, length, 0]
        .iter()
        .flat_map(|word| word.to_ne_bytes())
        .collect()
}

fn number(channel: &Channel, request: u32) -> Result<u64> {
    let answer = channel.call(request, &[], &[])?;
    let bytes: [u8; 8] = answer.try_into().map_err(|answer: Vec<u8>| Error::Answer {
        request,
        what: format!("{} bytes", answer.len()),
    })?;
    Ok(u64::from_ne_bytes(bytes))
}
