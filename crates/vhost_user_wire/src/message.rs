//! Requests of the front end.

use std::os::fd::OwnedFd;

use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::payload::{
    Config, Inflight, Log, MemoryRegion, SingleRegion, VringAddr, VringState, fixed,
};
use crate::{DESCRIPTORS_MAX, WireError, request};

/// Flag in a vring's number: no descriptor.
const NO_FD: u64 = 1 << 8;

/// A request of the front end with its descriptors of type `F`.
#[derive(Debug)]
#[allow(missing_docs, reason = "names of the specification")]
pub enum Message<F = OwnedFd> {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemTable(Vec<(MemoryRegion, F)>),
    SetLogBase(Log, F),
    SetLogFd(F),
    SetVringNum(VringState),
    SetVringAddr(VringAddr),
    SetVringBase(VringState),
    GetVringBase(VringState),
    SetVringKick(u8, Option<F>),
    SetVringCall(u8, Option<F>),
    SetVringErr(u8, Option<F>),
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable(VringState),
    SetBackendReqFd(F),
    GetConfig(Config),
    SetConfig(Config),
    GetInflightFd(Inflight),
    SetInflightFd(Inflight, F),
    ResetDevice,
    GetMaxMemSlots,
    AddMemReg(MemoryRegion, F),
    RemMemReg(MemoryRegion),
}

/// Parses a message. Closes unexpected descriptors, because some front ends send them.
///
/// # Errors
/// Fails if the message has an invalid size, number of descriptors, flag or field, or an unknown request.
pub fn parse(bytes: &[u8], fds: Vec<OwnedFd>) -> Result<Message, WireError> {
    let (number, payload) = crate::split(bytes, 0)?;
    Ok(match number {
        request::GET_FEATURES => empty(payload, Message::GetFeatures)?,
        request::SET_FEATURES => Message::SetFeatures(fixed(payload)?),
        request::SET_OWNER => empty(payload, Message::SetOwner)?,
        request::RESET_OWNER => empty(payload, Message::ResetOwner)?,
        request::SET_MEM_TABLE => Message::SetMemTable(regions(payload, fds)?),
        request::SET_LOG_BASE => Message::SetLogBase(fixed::<Log>(payload)?.checked()?, one(fds)?),
        request::SET_LOG_FD => Message::SetLogFd(one(fds)?),
        request::SET_VRING_NUM => Message::SetVringNum(fixed(payload)?),
        request::SET_VRING_ADDR => Message::SetVringAddr(fixed::<VringAddr>(payload)?.checked()?),
        request::SET_VRING_BASE => Message::SetVringBase(fixed(payload)?),
        request::GET_VRING_BASE => Message::GetVringBase(fixed(payload)?),
        request::SET_VRING_KICK..=request::SET_VRING_ERR => {
            let word = fixed::<u64>(payload)?;
            let fd = (word & NO_FD == 0).then(|| one(fds)).transpose()?;
            match number {
                request::SET_VRING_KICK => Message::SetVringKick(word as u8, fd),
                request::SET_VRING_CALL => Message::SetVringCall(word as u8, fd),
                _ => Message::SetVringErr(word as u8, fd),
            }
        }
        request::GET_PROTOCOL_FEATURES => empty(payload, Message::GetProtocolFeatures)?,
        request::SET_PROTOCOL_FEATURES => Message::SetProtocolFeatures(fixed(payload)?),
        request::GET_QUEUE_NUM => empty(payload, Message::GetQueueNum)?,
        request::SET_VRING_ENABLE => Message::SetVringEnable(fixed(payload)?),
        request::SET_BACKEND_REQ_FD => Message::SetBackendReqFd(one(fds)?),
        request::GET_CONFIG => Message::GetConfig(Config::parse(payload)?.checked()?),
        request::SET_CONFIG => Message::SetConfig(Config::parse(payload)?.checked()?),
        request::GET_INFLIGHT_FD => Message::GetInflightFd(fixed::<Inflight>(payload)?.checked()?),
        request::SET_INFLIGHT_FD => {
            Message::SetInflightFd(fixed::<Inflight>(payload)?.checked()?, one(fds)?)
        }
        request::RESET_DEVICE => empty(payload, Message::ResetDevice)?,
        request::GET_MAX_MEM_SLOTS => empty(payload, Message::GetMaxMemSlots)?,
        request::ADD_MEM_REG => {
            Message::AddMemReg(fixed::<SingleRegion>(payload)?.region, one(fds)?)
        }
        request::REM_MEM_REG => Message::RemMemReg(fixed::<SingleRegion>(payload)?.region),
        _ => return Err(WireError::Request),
    })
}

fn empty(payload: &[u8], message: Message) -> Result<Message, WireError> {
    match payload.len() {
        0 => Ok(message),
        size => Err(WireError::Size(size)),
    }
}

fn one(fds: Vec<OwnedFd>) -> Result<OwnedFd, WireError> {
    let [fd] = <[OwnedFd; 1]>::try_from(fds).map_err(|fds| WireError::Descriptors(fds.len()))?;
    Ok(fd)
}

/// Parses a memory regions description: number of regions, padding of 32 bits, and the regions. A table may be empty.
fn regions(payload: &[u8], fds: Vec<OwnedFd>) -> Result<Vec<(MemoryRegion, OwnedFd)>, WireError> {
    let invalid = || WireError::Size(payload.len());
    let ([count, _padding], rest) = <[u32; 2]>::read_from_prefix(payload).map_err(|_| invalid())?;
    let count = count as usize;
    if count == 0 {
        return Ok(Vec::new());
    }
    if count > DESCRIPTORS_MAX || count != fds.len() {
        return Err(WireError::Descriptors(fds.len()));
    }
    if rest.len() != count * size_of::<MemoryRegion>() {
        return Err(invalid());
    }
    let regions = rest.chunks_exact(size_of::<MemoryRegion>());
    regions
        .zip(fds)
        .map(|(region, fd)| Ok((fixed(region)?, fd)))
        .collect()
}

impl<F> Message<F> {
    /// Returns the request number, the payload and the descriptors.
    pub fn into_parts(self) -> (u32, Vec<u8>, Vec<F>) {
        let none = |request| (request, Vec::new(), Vec::new());
        match self {
            Message::GetFeatures => none(request::GET_FEATURES),
            Message::SetFeatures(bits) => plain(request::SET_FEATURES, bits),
            Message::SetOwner => none(request::SET_OWNER),
            Message::ResetOwner => none(request::RESET_OWNER),
            Message::SetMemTable(regions) => {
                let mut payload = [regions.len() as u32, 0].as_bytes().to_vec();
                let fds = regions.into_iter().map(|(region, fd)| {
                    payload.extend(region.as_bytes());
                    fd
                });
                let fds = fds.collect();
                (request::SET_MEM_TABLE, payload, fds)
            }
            Message::SetLogBase(log, fd) => with_fd(request::SET_LOG_BASE, log, fd),
            Message::SetLogFd(fd) => with_fd(request::SET_LOG_FD, (), fd),
            Message::SetVringNum(state) => plain(request::SET_VRING_NUM, state),
            Message::SetVringAddr(addresses) => plain(request::SET_VRING_ADDR, addresses),
            Message::SetVringBase(state) => plain(request::SET_VRING_BASE, state),
            Message::GetVringBase(state) => plain(request::GET_VRING_BASE, state),
            Message::SetVringKick(index, fd) => vring_fd(request::SET_VRING_KICK, index, fd),
            Message::SetVringCall(index, fd) => vring_fd(request::SET_VRING_CALL, index, fd),
            Message::SetVringErr(index, fd) => vring_fd(request::SET_VRING_ERR, index, fd),
            Message::GetProtocolFeatures => none(request::GET_PROTOCOL_FEATURES),
            Message::SetProtocolFeatures(bits) => plain(request::SET_PROTOCOL_FEATURES, bits),
            Message::GetQueueNum => none(request::GET_QUEUE_NUM),
            Message::SetVringEnable(state) => plain(request::SET_VRING_ENABLE, state),
            Message::SetBackendReqFd(fd) => with_fd(request::SET_BACKEND_REQ_FD, (), fd),
            Message::GetConfig(config) => (request::GET_CONFIG, config.encode(), Vec::new()),
            Message::SetConfig(config) => (request::SET_CONFIG, config.encode(), Vec::new()),
            Message::GetInflightFd(inflight) => plain(request::GET_INFLIGHT_FD, inflight),
            Message::SetInflightFd(inflight, fd) => with_fd(request::SET_INFLIGHT_FD, inflight, fd),
            Message::ResetDevice => none(request::RESET_DEVICE),
            Message::GetMaxMemSlots => none(request::GET_MAX_MEM_SLOTS),
            Message::AddMemReg(region, fd) => {
                with_fd(request::ADD_MEM_REG, SingleRegion::from(region), fd)
            }
            Message::RemMemReg(region) => plain(request::REM_MEM_REG, SingleRegion::from(region)),
        }
    }

    /// Returns the bytes of the message with these flags, and its descriptors.
    pub fn encode(self, flags: u32) -> (Vec<u8>, Vec<F>) {
        let (request, payload, fds) = self.into_parts();
        (crate::encode(request, flags, &payload), fds)
    }
}

fn plain<F>(request: u32, payload: impl IntoBytes + Immutable) -> (u32, Vec<u8>, Vec<F>) {
    (request, payload.as_bytes().to_vec(), Vec::new())
}

fn with_fd<F>(request: u32, payload: impl IntoBytes + Immutable, fd: F) -> (u32, Vec<u8>, Vec<F>) {
    (request, payload.as_bytes().to_vec(), vec![fd])
}

fn vring_fd<F>(request: u32, index: u8, fd: Option<F>) -> (u32, Vec<u8>, Vec<F>) {
    let flag = if fd.is_some() { 0 } else { NO_FD };
    let payload = (u64::from(index) | flag).as_bytes().to_vec();
    (request, payload, fd.into_iter().collect())
}
