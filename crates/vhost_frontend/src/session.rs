//! A session: feature negotiation, shared memory, start and stop of vrings, configuration space.
//!
//! Requests use acknowledgements if the back end offers them, so that a refusal is attributed to its request.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;

use guest_memory::{MemoryTable, RegionSpec};
use vhost_user_wire::{Config, Reply, VringAddr, VringState, protocol_feature};
use virtqueue::driver::RingLayout;

use crate::memory::{Area, Memory};
use crate::queue::{Queue, QueueOptions};
use crate::{Channel, Error, Message, Result, request};

/// Feature bits of the transport and the rings.
pub mod feature {
    #![allow(missing_docs)]
    pub const LOG_ALL: u64 = 1 << 26;
    pub const INDIRECT_DESC: u64 = 1 << 28;
    pub const EVENT_IDX: u64 = 1 << 29;
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    pub const VERSION_1: u64 = 1 << 32;
    pub const RING_PACKED: u64 = 1 << 34;
}

/// Options of a session.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Use packed rings.
    pub packed: bool,
    /// Accept `VIRTIO_F_EVENT_IDX` if offered.
    pub event_idx: bool,
    /// Feature bits of the device type to accept if offered.
    pub device_features: u64,
    /// Protocol feature bits to accept if offered.
    pub protocol_features: u64,
    /// Size of the first memory region in bytes.
    pub memory: usize,
    /// Use huge pages for that region, which the machine must have reserved.
    pub huge_pages: bool,
}

impl Default for Options {
    fn default() -> Self {
        use protocol_feature::{CONFIG, CONFIGURE_MEM_SLOTS, MQ, REPLY_ACK, RESET_DEVICE};
        Options {
            packed: false,
            event_idx: true,
            device_features: 0x00ff_ffff,
            protocol_features: MQ | REPLY_ACK | CONFIG | CONFIGURE_MEM_SLOTS | RESET_DEVICE,
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
    protocol: u64,
    queue_count: u16,
}

impl FrontEnd {
    /// Connects, negotiates features and shares the memory.
    pub fn connect(path: &Path, options: &Options) -> Result<FrontEnd> {
        FrontEnd::from_channel(Channel::connect(path)?, options)
    }

    /// As [`FrontEnd::connect`], over an open channel.
    pub fn from_channel(channel: Channel, options: &Options) -> Result<FrontEnd> {
        let mut front_end = FrontEnd {
            channel,
            memory: Memory::new(options.memory, options.huge_pages)?,
            offered: 0,
            features: 0,
            protocol: 0,
            queue_count: 1,
        };
        front_end.negotiate(options)?;
        front_end.send_memory()?;
        Ok(front_end)
    }

    fn negotiate(&mut self, options: &Options) -> Result<()> {
        use feature::{EVENT_IDX, INDIRECT_DESC, PROTOCOL_FEATURES, RING_PACKED, VERSION_1};
        let channel = &self.channel;
        channel.tell(Message::SetOwner)?;
        self.offered = number(channel, Message::GetFeatures)?;
        let mut wanted = VERSION_1 | PROTOCOL_FEATURES | INDIRECT_DESC | options.device_features;
        if options.event_idx {
            wanted |= EVENT_IDX;
        }
        if options.packed {
            wanted |= RING_PACKED;
        }
        self.features = self.offered & wanted;
        if self.offered & PROTOCOL_FEATURES != 0 {
            let offered = number(channel, Message::GetProtocolFeatures)?;
            self.protocol = offered & options.protocol_features;
            channel.tell(Message::SetProtocolFeatures(self.protocol))?;
        }
        if self.has_protocol(protocol_feature::MQ) {
            let count = number(channel, Message::GetQueueNum)?;
            self.queue_count = u16::try_from(count).unwrap_or(u16::MAX);
        }
        self.acknowledge(Message::SetFeatures(self.features))
    }

    /// Returns the message channel.
    pub fn channel(&self) -> &Channel {
        &self.channel
    }

    /// Returns the feature bits offered by the back end.
    pub fn offered(&self) -> u64 {
        self.offered
    }

    /// Returns the negotiated feature bits.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Returns true if a feature was negotiated.
    pub fn has(&self, bit: u64) -> bool {
        self.features & bit != 0
    }

    /// Returns true if a protocol feature was negotiated.
    pub fn has_protocol(&self, bit: u64) -> bool {
        self.protocol & bit != 0
    }

    /// Returns the number of queues of the device.
    pub fn queue_count(&self) -> u16 {
        self.queue_count
    }

    /// Returns the guest's memory.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Returns the guest's memory for changes without messages to the back end.
    pub fn memory_mut(&mut self) -> &mut Memory {
        &mut self.memory
    }

    /// Returns the memory as a table for the driver side of a ring.
    pub fn table(&self) -> Result<Arc<MemoryTable>> {
        Ok(Arc::new(self.memory.table()?))
    }

    /// Allocates guest memory.
    pub fn allocate(&mut self, bytes: usize, alignment: u64) -> Result<Area> {
        self.memory.allocate(bytes, alignment)
    }

    /// Sends all regions (`SET_MEM_TABLE`).
    pub fn send_memory(&self) -> Result<()> {
        self.acknowledge(self.memory.message())
    }

    /// Adds a region during operation (`ADD_MEM_REG`).
    pub fn add_region(&mut self, size: usize) -> Result<Area> {
        let region = self.memory.add(size)?;
        let (area, description) = (region.area(), region.description());
        let file = region.file.try_clone()?;
        self.acknowledge(Message::AddMemReg(description, file.as_fd()))?;
        Ok(area)
    }

    /// Removes the region that starts at a guest-physical address (`REM_MEM_REG`).
    pub fn remove_region(&mut self, guest_address: u64) -> Result<()> {
        let Some(region) = self.memory.take(guest_address) else {
            return Err(Error::Wrong(format!("no region at {guest_address:#x}")));
        };
        self.acknowledge(Message::RemMemReg(region.description()))
    }

    /// Reads the configuration space.
    pub fn config(&self, offset: u32, length: u32) -> Result<Vec<u8>> {
        let read = Message::GetConfig(config(offset, vec![0; length as usize]));
        match self.channel.ask(read)? {
            Reply::Config(config) if config.region.len() == length as usize => Ok(config.region),
            _ => Err(unexpected(request::GET_CONFIG)),
        }
    }

    /// Writes to the configuration space.
    pub fn write_config(&self, offset: u32, bytes: &[u8]) -> Result<()> {
        let write = Message::SetConfig(config(offset, bytes.to_vec()));
        self.acknowledge(write)
    }

    /// Configures and starts a vring.
    pub fn start_queue(&mut self, index: u16, options: &QueueOptions) -> Result<Queue> {
        let queue = self.place_queue(index, options)?;
        self.begin_queue(&queue, queue.base())?;
        Ok(queue)
    }

    /// Allocates a ring in memory, without a message to the back end.
    pub fn place_queue(&mut self, index: u16, options: &QueueOptions) -> Result<Queue> {
        Queue::allocate(self, index, options)
    }

    /// Configures a ring in the back end and starts it from `base` on.
    pub fn begin_queue(&self, queue: &Queue, base: u32) -> Result<()> {
        let (call, kick) = (queue.call().as_fd(), queue.kick_fd().as_fd());
        self.begin_ring(queue.index(), queue.layout(), base, call, kick)
    }

    /// As [`FrontEnd::begin_queue`], for a ring driven by the caller.
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

    /// Sends size, base and addresses of a ring.
    pub fn describe_queue(&self, queue: &Queue, base: u32) -> Result<()> {
        self.describe_ring(queue.index(), queue.layout(), base)
    }

    fn describe_ring(&self, index: u16, layout: &RingLayout, base: u32) -> Result<()> {
        let size = Message::SetVringNum(state(index, u32::from(layout.size)));
        self.acknowledge(size)?;
        self.acknowledge(Message::SetVringBase(state(index, base)))?;
        let addresses = [
            layout.descriptor_area,
            layout.device_area,
            layout.driver_area,
        ];
        self.set_addresses(index, addresses.map(|address| self.user_address(address)))
    }

    /// Sends the user addresses of a ring: descriptors, used, available.
    pub fn set_addresses(&self, index: u16, addresses: [u64; 3]) -> Result<()> {
        let [descriptor, used, available] = addresses;
        self.acknowledge(Message::SetVringAddr(VringAddr {
            index: u32::from(index),
            flags: 0,
            descriptor,
            used,
            available,
            log: 0,
        }))
    }

    /// Translates a guest-physical address to a user address. An address outside the memory is returned unchanged.
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

    /// Stops a vring after its requests in flight. Returns its base.
    pub fn stop_queue(&self, index: u16) -> Result<u32> {
        let stop = Message::GetVringBase(state(index, 0));
        match self.channel.ask(stop)? {
            Reply::VringState(state) => Ok(state.num),
            _ => Err(unexpected(request::GET_VRING_BASE)),
        }
    }

    /// Sets or removes the interrupt descriptor.
    pub fn set_call(&self, index: u16, fd: Option<BorrowedFd<'_>>) -> Result<()> {
        self.acknowledge(Message::SetVringCall(index as u8, fd))
    }

    /// Sets or removes the kick descriptor. Without one, the back end polls the ring.
    pub fn set_kick(&self, index: u16, fd: Option<BorrowedFd<'_>>) -> Result<()> {
        self.acknowledge(Message::SetVringKick(index as u8, fd))
    }

    /// Sets or removes the error descriptor.
    pub fn set_error(&self, index: u16, fd: Option<BorrowedFd<'_>>) -> Result<()> {
        self.acknowledge(Message::SetVringErr(index as u8, fd))
    }

    /// Enables or disables a vring.
    pub fn enable(&self, index: u16, enabled: bool) -> Result<()> {
        let enable = Message::SetVringEnable(state(index, u32::from(enabled)));
        self.acknowledge(enable)
    }

    /// Resets the device; it must be configured again.
    pub fn reset_device(&self) -> Result<()> {
        self.acknowledge(Message::ResetDevice)
    }

    /// Sends any request that only has an acknowledgement. Without `REPLY_ACK`, waits until the back end has processed it.
    pub fn acknowledged(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        if self.has_protocol(protocol_feature::REPLY_ACK) {
            return self.channel.acknowledged(request, payload, fds);
        }
        self.channel.send(request, 0, payload, fds)?;
        number(&self.channel, Message::GetFeatures).map(drop)
    }

    /// As [`FrontEnd::acknowledged`], for a valid message.
    pub(crate) fn acknowledge(&self, message: Message<'_>) -> Result<()> {
        let (request, payload, fds) = message.into_parts();
        self.acknowledged(request, &payload, &fds)
    }
}

fn state(index: u16, num: u32) -> VringState {
    VringState {
        index: u32::from(index),
        num,
    }
}

/// Returns an access to the configuration space by the driver.
fn config(offset: u32, region: Vec<u8>) -> Config {
    Config {
        offset,
        flags: 0,
        region,
    }
}

fn number(channel: &Channel, message: Message<'_>) -> Result<u64> {
    match channel.ask(message)? {
        Reply::U64(number) => Ok(number),
        reply => Err(Error::Wrong(format!("{reply:?} in place of a number"))),
    }
}

/// Returns the error for a reply with another payload than `request` asks for.
pub(crate) fn unexpected(request: u32) -> Error {
    Error::Answer {
        request,
        reason: "unexpected payload".into(),
    }
}
