//! Requests of the front end.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use zerocopy::{FromBytes, IntoBytes};

use crate::payload::{Config, Inflight, Log, MemoryRegion, VringAddr, VringState, fixed};
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

/// Parses a message. Closes descriptors of a message without any, which some front ends send.
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
        request::ADD_MEM_REG => Message::AddMemReg(single_region(payload)?, one(fds)?),
        request::REM_MEM_REG => Message::RemMemReg(single_region(payload)?),
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

/// Parses a single memory region description: padding of 64 bits and a region.
fn single_region(payload: &[u8]) -> Result<MemoryRegion, WireError> {
    let (_padding, region) = payload
        .split_at_checked(8)
        .ok_or(WireError::Size(payload.len()))?;
    fixed(region)
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

impl<F: AsFd> Message<F> {
    /// Returns the request number, the payload and the descriptors.
    pub fn parts(&self) -> (u32, Vec<u8>, Vec<BorrowedFd<'_>>) {
        let none = Vec::new;
        match self {
            Message::GetFeatures => (request::GET_FEATURES, none(), vec![]),
            Message::SetFeatures(bits) => (request::SET_FEATURES, of(bits), vec![]),
            Message::SetOwner => (request::SET_OWNER, none(), vec![]),
            Message::ResetOwner => (request::RESET_OWNER, none(), vec![]),
            Message::SetMemTable(regions) => {
                let mut payload = of(&[regions.len() as u32, 0]);
                regions
                    .iter()
                    .for_each(|(region, _)| payload.extend(region.as_bytes()));
                let fds = regions.iter().map(|(_, fd)| fd.as_fd()).collect();
                (request::SET_MEM_TABLE, payload, fds)
            }
            Message::SetLogBase(log, fd) => (request::SET_LOG_BASE, of(log), vec![fd.as_fd()]),
            Message::SetLogFd(fd) => (request::SET_LOG_FD, none(), vec![fd.as_fd()]),
            Message::SetVringNum(state) => (request::SET_VRING_NUM, of(state), vec![]),
            Message::SetVringAddr(addresses) => (request::SET_VRING_ADDR, of(addresses), vec![]),
            Message::SetVringBase(state) => (request::SET_VRING_BASE, of(state), vec![]),
            Message::GetVringBase(state) => (request::GET_VRING_BASE, of(state), vec![]),
            Message::SetVringKick(index, fd) => vring_fd(request::SET_VRING_KICK, *index, fd),
            Message::SetVringCall(index, fd) => vring_fd(request::SET_VRING_CALL, *index, fd),
            Message::SetVringErr(index, fd) => vring_fd(request::SET_VRING_ERR, *index, fd),
            Message::GetProtocolFeatures => (request::GET_PROTOCOL_FEATURES, none(), vec![]),
            Message::SetProtocolFeatures(bits) => {
                (request::SET_PROTOCOL_FEATURES, of(bits), vec![])
            }
            Message::GetQueueNum => (request::GET_QUEUE_NUM, none(), vec![]),
            Message::SetVringEnable(state) => (request::SET_VRING_ENABLE, of(state), vec![]),
            Message::SetBackendReqFd(fd) => (request::SET_BACKEND_REQ_FD, none(), vec![fd.as_fd()]),
            Message::GetConfig(config) => (request::GET_CONFIG, config.encode(), vec![]),
            Message::SetConfig(config) => (request::SET_CONFIG, config.encode(), vec![]),
            Message::GetInflightFd(inflight) => (request::GET_INFLIGHT_FD, of(inflight), vec![]),
            Message::SetInflightFd(inflight, fd) => {
                (request::SET_INFLIGHT_FD, of(inflight), vec![fd.as_fd()])
            }
            Message::ResetDevice => (request::RESET_DEVICE, none(), vec![]),
            Message::GetMaxMemSlots => (request::GET_MAX_MEM_SLOTS, none(), vec![]),
            Message::AddMemReg(region, fd) => {
                let payload = [&[0; 8], region.as_bytes()].concat();
                (request::ADD_MEM_REG, payload, vec![fd.as_fd()])
            }
            Message::RemMemReg(region) => {
                let payload = [&[0; 8], region.as_bytes()].concat();
                (request::REM_MEM_REG, payload, vec![])
            }
        }
    }

    /// Returns the bytes of the message with these flags, and its descriptors.
    pub fn encode(&self, flags: u32) -> (Vec<u8>, Vec<BorrowedFd<'_>>) {
        let (request, payload, fds) = self.parts();
        (crate::encode(request, flags, &payload), fds)
    }
}

fn of(payload: &(impl IntoBytes + zerocopy::Immutable)) -> Vec<u8> {
    payload.as_bytes().to_vec()
}

fn vring_fd<F: AsFd>(
    request: u32,
    index: u8,
    fd: &Option<F>,
) -> (u32, Vec<u8>, Vec<BorrowedFd<'_>>) {
    let flag = if fd.is_some() { 0 } else { NO_FD };
    let fds = fd.iter().map(AsFd::as_fd).collect();
    (request, of(&(u64::from(index) | flag)), fds)
}
