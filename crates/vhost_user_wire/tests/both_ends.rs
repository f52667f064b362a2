//! The crate `vhost` as the other end: its messages are parsed to the fields that were sent, and it understands the encoded ones.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use vhost::vhost_user::message::*;
use vhost::vhost_user::{
    Backend, BackendReqHandler, Error, Frontend, GpuBackend, VhostUserBackendReqHandlerMut,
    VhostUserFrontend, VhostUserProtocolFeatures as Protocol,
};
use vhost::{VhostBackend, VhostUserDirtyLogRegion, VhostUserMemoryRegionInfo, VringConfigData};
use vhost_user_wire::stream::{receive, send};
use vhost_user_wire::{
    Config, Header, Inflight, Log, MemoryRegion, Message, Reply, VringAddr, VringState, encode,
    parse, parse_reply, request,
};

const LIMIT: Duration = Duration::from_secs(10);
const INFLIGHT: Inflight = Inflight {
    mmap_size: 4096,
    mmap_offset: 8192,
    num_queues: 2,
    queue_size: 128,
    padding: 0,
};
const LOG: Log = Log {
    mmap_size: 4096,
    mmap_offset: 1 << 40,
};
const REGION: MemoryRegion = MemoryRegion {
    guest_address: 1 << 32,
    size: 4096,
    user_address: 2 << 32,
    mmap_offset: 8192,
};
const ADDRESSES: VringAddr = VringAddr {
    index: 3,
    flags: 1,
    descriptor: 16,
    used: 4,
    available: 2,
    log: 12345,
};

fn state(index: u32, num: u32) -> VringState {
    VringState { index, num }
}

fn config() -> Config {
    Config {
        offset: 32,
        flags: 1,
        region: vec![7, 8],
    }
}

/// Returns every message, and whether it has a reply of its own.
fn messages(fd: BorrowedFd<'_>) -> Vec<(Message<BorrowedFd<'_>>, bool)> {
    vec![
        (Message::GetFeatures, true),
        (Message::SetFeatures(1 << 30 | 5), false),
        (Message::GetProtocolFeatures, true),
        (Message::SetProtocolFeatures(Protocol::all().bits()), false),
        (Message::SetOwner, false),
        (Message::ResetOwner, false),
        (Message::GetQueueNum, true),
        (
            Message::SetMemTable(vec![(REGION, fd), (MemoryRegion { size: 2, ..REGION }, fd)]),
            false,
        ),
        (Message::SetLogBase(LOG, fd), true),
        (Message::SetVringNum(state(1, 256)), false),
        (Message::SetVringAddr(ADDRESSES), false),
        (Message::SetVringBase(state(2, 0x1234)), false),
        (Message::GetVringBase(state(2, 0)), true),
        (Message::SetVringKick(1, Some(fd)), false),
        (Message::SetVringCall(2, Some(fd)), false),
        (Message::SetVringErr(3, Some(fd)), false),
        (Message::SetVringEnable(state(1, 1)), false),
        (Message::SetBackendReqFd(fd), false),
        (Message::GetConfig(config()), true),
        (Message::SetConfig(config()), false),
        (Message::GetInflightFd(INFLIGHT), true),
        (Message::SetInflightFd(INFLIGHT, fd), false),
        (Message::ResetDevice, false),
        (Message::GetMaxMemSlots, true),
        (Message::AddMemReg(REGION, fd), false),
        (Message::RemMemReg(REGION), false),
    ]
}

/// Replies to a message as the back end of these tests.
fn reply_to(request: u32, file: &File) -> Reply<BorrowedFd<'_>> {
    match request {
        request::GET_FEATURES => Reply::U64(1 << 30 | 5),
        request::GET_PROTOCOL_FEATURES => Reply::U64(Protocol::all().bits()),
        request::GET_QUEUE_NUM => Reply::U64(8),
        request::GET_MAX_MEM_SLOTS => Reply::U64(512),
        request::GET_VRING_BASE => Reply::VringState(state(2, 77)),
        request::GET_CONFIG => Reply::Config(config()),
        request::GET_INFLIGHT_FD => Reply::Inflight(INFLIGHT, Some(file.as_fd())),
        request::SET_LOG_BASE => Reply::Log(LOG),
        _ => Reply::U64(0),
    }
}

/// Sends every message with the crate's front end.
fn drive(stream: UnixStream, file: &File, channel: &UnixStream) {
    let mut front_end = Frontend::from_stream(stream, 8);
    assert_eq!(front_end.get_features().unwrap(), 1 << 30 | 5);
    front_end.set_features(1 << 30 | 5).unwrap();
    assert_eq!(front_end.get_protocol_features().unwrap(), Protocol::all());
    front_end.set_protocol_features(Protocol::all()).unwrap();
    front_end.set_owner().unwrap();
    front_end.reset_owner().unwrap();
    assert_eq!(front_end.get_queue_num().unwrap(), 8);
    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr: REGION.guest_address,
        memory_size: REGION.size,
        userspace_addr: REGION.user_address,
        mmap_offset: REGION.mmap_offset,
        mmap_handle: file.as_raw_fd(),
    };
    let mut second = region;
    second.memory_size = 2;
    front_end.set_mem_table(&[region, second]).unwrap();
    let log = VhostUserDirtyLogRegion {
        mmap_size: LOG.mmap_size,
        mmap_offset: LOG.mmap_offset,
        mmap_handle: file.as_raw_fd(),
    };
    front_end.set_log_base(0, Some(log)).unwrap();
    front_end.set_vring_num(1, 256).unwrap();
    let addresses = VringConfigData {
        queue_max_size: 256,
        queue_size: 256,
        flags: ADDRESSES.flags,
        desc_table_addr: ADDRESSES.descriptor,
        used_ring_addr: ADDRESSES.used,
        avail_ring_addr: ADDRESSES.available,
        log_addr: Some(ADDRESSES.log),
    };
    front_end.set_vring_addr(3, &addresses).unwrap();
    front_end.set_vring_base(2, 0x1234).unwrap();
    assert_eq!(front_end.get_vring_base(2).unwrap(), 77);
    let event = vmm_sys_util::eventfd::EventFd::new(0).unwrap();
    front_end.set_vring_kick(1, &event).unwrap();
    front_end.set_vring_call(2, &event).unwrap();
    front_end.set_vring_err(3, &event).unwrap();
    front_end.set_vring_enable(1, true).unwrap();
    front_end.set_backend_request_fd(channel).unwrap();
    let flags = VhostUserConfigFlags::WRITABLE;
    let read = front_end.get_config(32, 2, flags, &[7, 8]).unwrap();
    assert_eq!(read.1, [7, 8]);
    front_end.set_config(32, flags, &[7, 8]).unwrap();
    let inflight = VhostUserInflight::new(4096, 8192, 2, 128);
    let (created, _) = front_end.get_inflight_fd(&inflight).unwrap();
    assert_eq!(created.mmap_size, 4096);
    let fd = file.as_raw_fd();
    front_end.set_inflight_fd(&inflight, fd).unwrap();
    front_end.reset_device().unwrap();
    assert_eq!(front_end.get_max_mem_slots().unwrap(), 512);
    front_end.add_mem_region(&region).unwrap();
    front_end.remove_mem_region(&region).unwrap();
}

/// Shows the fields of a message. Descriptors differ in their numbers. The crate `vhost` sends uninitialised padding.
fn shown(message: &impl std::fmt::Debug) -> String {
    let text = format!("{message:?}");
    let without_numbers = |key: &str, text: String| {
        let mut parts = text.split(key);
        let first = parts.next().unwrap().to_owned();
        parts.fold(first, |shown, part| {
            shown + part.trim_start_matches(|c: char| c.is_ascii_digit())
        })
    };
    let text = text.replace("BorrowedFd", "OwnedFd");
    without_numbers("padding: ", without_numbers("fd: ", text))
}

#[test]
fn messages_of_vhost_are_parsed_to_their_fields() {
    let file = File::open("/dev/null").unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| drive(theirs, &file, &UnixStream::pair().unwrap().0));
        for (expected, has_reply) in messages(file.as_fd()) {
            let (bytes, fds) = receive(&ours, LIMIT).unwrap();
            let (header, _) = Header::parse(&bytes).unwrap();
            let message = parse(&bytes, fds).unwrap();
            assert_eq!(shown(&message), shown(&expected));
            if has_reply || header.needs_reply() {
                let reply = reply_to(header.request, &file);
                let (bytes, fd) = reply.encode(header.request);
                send(&ours, &bytes, fd.as_slice()).unwrap();
            }
        }
        assert_eq!(
            receive(&ours, LIMIT).unwrap_err().kind(),
            std::io::ErrorKind::UnexpectedEof
        );
    });
}

/// Its front end waits for a whole log and hangs after a shorter acknowledgement.
#[test]
fn refused_log_is_an_error_for_vhost() {
    let file = File::open("/dev/null").unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut front_end = Frontend::from_stream(theirs, 8);
            front_end.get_features().unwrap();
            front_end.set_features(1 << 30 | 5).unwrap();
            front_end.get_protocol_features().unwrap();
            front_end.set_protocol_features(Protocol::all()).unwrap();
            front_end.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
            let log = VhostUserDirtyLogRegion {
                mmap_size: LOG.mmap_size,
                mmap_offset: LOG.mmap_offset,
                mmap_handle: file.as_raw_fd(),
            };
            assert!(front_end.set_log_base(0, Some(log)).is_err());
        });
        while let Ok((bytes, _)) = receive(&ours, LIMIT) {
            let (header, _) = Header::parse(&bytes).unwrap();
            let reply = match header.request {
                request::SET_LOG_BASE => Reply::Log(Log::REFUSED),
                request::SET_FEATURES | request::SET_PROTOCOL_FEATURES => continue,
                request => reply_to(request, &file),
            };
            send(
                &ours,
                &reply.encode(header.request).0,
                &[] as &[BorrowedFd<'_>],
            )
            .unwrap();
        }
    });
}

/// Records the calls of the crate's back end in the format of messages.
struct Recorder(Vec<String>, File);

impl Recorder {
    fn record<F: AsFd + std::fmt::Debug>(&mut self, message: Message<F>) -> Result<(), Error> {
        self.0.push(shown(&message));
        Ok(())
    }

    fn vring(&mut self, name: &str, index: u8, fd: Option<File>) -> Result<(), Error> {
        let fd = fd.map(std::os::fd::OwnedFd::from);
        self.0.push(shown(&format_args!("{name}({index}, {fd:?})")));
        Ok(())
    }
}

fn region_of(region: &VhostUserMemoryRegion) -> MemoryRegion {
    MemoryRegion {
        guest_address: region.guest_phys_addr,
        size: region.memory_size,
        user_address: region.user_addr,
        mmap_offset: region.mmap_offset,
    }
}

fn inflight_of(inflight: &VhostUserInflight) -> Inflight {
    Inflight {
        mmap_size: inflight.mmap_size,
        mmap_offset: inflight.mmap_offset,
        num_queues: inflight.num_queues,
        queue_size: inflight.queue_size,
        padding: 0,
    }
}

type None = std::os::fd::OwnedFd;
type Done<T> = Result<T, Error>;

impl VhostUserBackendReqHandlerMut for Recorder {
    fn set_owner(&mut self) -> Done<()> {
        self.record::<None>(Message::SetOwner)
    }
    fn reset_owner(&mut self) -> Done<()> {
        self.record::<None>(Message::ResetOwner)
    }
    fn reset_device(&mut self) -> Done<()> {
        self.record::<None>(Message::ResetDevice)
    }
    fn get_features(&mut self) -> Done<u64> {
        self.record::<None>(Message::GetFeatures)?;
        Ok(1 << 30 | 5)
    }
    fn set_features(&mut self, features: u64) -> Done<()> {
        self.record::<None>(Message::SetFeatures(features))
    }
    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _: Option<bool>,
    ) -> Done<Option<Vec<u64>>> {
        let fds = files.into_iter().map(std::os::fd::OwnedFd::from);
        let regions = regions.iter().map(region_of).zip(fds).collect();
        self.record(Message::SetMemTable(regions))?;
        Ok(Option::None)
    }
    fn set_vring_num(&mut self, index: u32, num: u32) -> Done<()> {
        self.record::<None>(Message::SetVringNum(state(index, num)))
    }
    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        log: u64,
    ) -> Done<()> {
        self.record::<None>(Message::SetVringAddr(VringAddr {
            index,
            flags: flags.bits(),
            descriptor,
            used,
            available,
            log,
        }))
    }
    fn set_vring_base(&mut self, index: u32, base: u32) -> Done<()> {
        self.record::<None>(Message::SetVringBase(state(index, base)))
    }
    fn get_vring_base(&mut self, index: u32) -> Done<VhostUserVringState> {
        self.record::<None>(Message::GetVringBase(state(index, 0)))?;
        Ok(VhostUserVringState::new(index, 77))
    }
    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Done<()> {
        self.vring("SetVringKick", index, fd)
    }
    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Done<()> {
        self.vring("SetVringCall", index, fd)
    }
    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Done<()> {
        self.vring("SetVringErr", index, fd)
    }
    fn get_protocol_features(&mut self) -> Done<Protocol> {
        self.record::<None>(Message::GetProtocolFeatures)?;
        Ok(Protocol::all())
    }
    fn set_protocol_features(&mut self, features: u64) -> Done<()> {
        self.record::<None>(Message::SetProtocolFeatures(features))
    }
    fn get_queue_num(&mut self) -> Done<u64> {
        self.record::<None>(Message::GetQueueNum)?;
        Ok(8)
    }
    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Done<()> {
        let state = state(index, u32::from(enable));
        self.record::<None>(Message::SetVringEnable(state))
    }
    fn get_config(&mut self, offset: u32, _: u32, flags: VhostUserConfigFlags) -> Done<Vec<u8>> {
        let region = config().region;
        self.record::<None>(Message::GetConfig(Config {
            offset,
            flags: flags.bits(),
            region: region.clone(),
        }))?;
        Ok(region)
    }
    fn set_config(&mut self, offset: u32, buf: &[u8], flags: VhostUserConfigFlags) -> Done<()> {
        self.record::<None>(Message::SetConfig(Config {
            offset,
            flags: flags.bits(),
            region: buf.to_vec(),
        }))
    }
    fn set_backend_req_fd(&mut self, _: Backend) {
        let fd = self.1.try_clone().unwrap();
        self.record(Message::SetBackendReqFd(None::from(fd)))
            .unwrap();
    }
    fn set_gpu_socket(&mut self, _: GpuBackend) -> Done<()> {
        Err(Error::InvalidParam)
    }
    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Done<File> {
        Err(Error::InvalidParam)
    }
    fn get_inflight_fd(&mut self, inflight: &VhostUserInflight) -> Done<(VhostUserInflight, File)> {
        self.record::<None>(Message::GetInflightFd(inflight_of(inflight)))?;
        Ok((*inflight, self.1.try_clone().unwrap()))
    }
    fn set_inflight_fd(&mut self, inflight: &VhostUserInflight, file: File) -> Done<()> {
        let message = Message::SetInflightFd(inflight_of(inflight), None::from(file));
        self.record(message)
    }
    fn get_max_mem_slots(&mut self) -> Done<u64> {
        self.record::<None>(Message::GetMaxMemSlots)?;
        Ok(512)
    }
    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        fd: File,
        _: Option<bool>,
    ) -> Done<Option<u64>> {
        self.record(Message::AddMemReg(region_of(region), None::from(fd)))?;
        Ok(Option::None)
    }
    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Done<()> {
        self.record::<None>(Message::RemMemReg(region_of(region)))
    }
    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Done<Option<File>> {
        Err(Error::InvalidParam)
    }
    fn check_device_state(&mut self) -> Done<()> {
        Err(Error::InvalidParam)
    }
    fn get_shmem_config(&mut self) -> Done<VhostUserShMemConfig> {
        Err(Error::InvalidParam)
    }
    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Done<()> {
        let log = Log {
            mmap_size: log.mmap_size,
            mmap_offset: log.mmap_offset,
        };
        self.record(Message::SetLogBase(log, None::from(file)))
    }
}

#[test]
fn vhost_understands_encoded_messages() {
    let file = File::open("/dev/null").unwrap();
    let socket = UnixStream::pair().unwrap().0;
    let (ours, theirs) = UnixStream::pair().unwrap();
    let recorder = Recorder(Vec::new(), file.try_clone().unwrap());
    let recorder = Arc::new(Mutex::new(recorder));
    let mut handler = BackendReqHandler::from_stream(theirs, recorder.clone());
    // The channel of SET_BACKEND_REQ_FD must be a socket.
    let messages = messages(socket.as_fd());
    for (message, has_reply) in messages {
        let sent = shown(&message);
        let (number, payload, fds) = message.into_parts();
        let bytes = encode(number, 0, &payload);
        send(&ours, &bytes, &fds).unwrap();
        handler.handle_request().unwrap();
        let recorded = recorder.lock().unwrap().0.pop();
        assert_eq!(recorded, Some(sent));
        if has_reply {
            let (bytes, fds) = receive(&ours, LIMIT).unwrap();
            let reply = parse_reply(number, &bytes, fds).unwrap();
            assert_eq!(shown(&reply), shown(&reply_to(number, &file)));
        }
    }
}
