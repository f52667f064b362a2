//! One connection in full feature phase, with a slot per request.
//!
//! Owned by one thread. Requests of a turn are sent with one `writev`; responses are received with one `readv`, large data directly into
//! its slot. Nothing is allocated per request. Any protocol error of the target ends the run.

use std::collections::VecDeque;
use std::io::{ErrorKind, IoSliceMut, Read};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use fastrand::Rng;
use iscsi::login::LoginResult;
use iscsi::pdu::{
    Bhs, DataIn, DataOut, Decoder, Digests, FINAL, IMMEDIATE, NO_TAG, NopIn, NopOut, Opcode,
    Progress, ReadyToTransfer, ScsiCommand, ScsiResponse, encode,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use scsi::Cdb;
use scsi::cdb::{self, UNMAP_LIST};

use super::{LOOK_UP, PATIENCE, SEGMENT_BYTES};
use crate::driver::outgoing::Outgoing;
use crate::driver::{Demand, Done, IoKind, scsi_cdb, scsi_end};

/// Size of the receive buffer for everything except direct data.
const STAGE_BYTES: usize = 256 << 10;
/// Minimum remaining length of a data segment for a direct receive.
const DIRECT_BYTES_MIN: usize = 4096;

struct Slot {
    data: Box<[u8]>,
    cdb: Cdb,
    ask: IoKind,
    busy: bool,
    length: u32,
    /// Bytes received.
    came: u32,
    /// First bytes of the slot's data, saved while a parameter list of UNMAP replaces them.
    saved: [u8; UNMAP_LIST],
    /// Number of uses: the upper half of the initiator task tag.
    uses: u16,
}

impl Slot {
    /// Turns the command into an UNMAP.
    fn unmap(&mut self, block: u64, blocks: u32) {
        let data = &mut self.data[..UNMAP_LIST];
        self.saved.copy_from_slice(data);
        let (cdb, list) = cdb::unmap(block, blocks);
        data.copy_from_slice(&list);
        (self.cdb, self.length) = (cdb, UNMAP_LIST as u32);
    }
}

/// A session with one connection.
pub struct IscsiQueue {
    stream: TcpStream,
    lun: [u8; 8],
    block_size: u32,
    digests: Digests,
    max_send: u32,
    /// Limits for unsolicited bytes: in the command PDU, and in total.
    immediate: u32,
    unsolicited: u32,
    cmd_sn: u32,
    max_cmd_sn: u32,
    exp_stat_sn: u32,
    slots: Vec<Slot>,
    /// Slots that wait for the target's command window.
    waiting: VecDeque<u16>,
    outgoing: Outgoing,
    decoder: Decoder,
    stage: Box<[u8]>,
    from: usize,
    to: usize,
    segment: Vec<u8>,
    /// Status and sense data of the last failed command.
    refused: (u8, Vec<u8>),
    done: Vec<Done>,
}

/// Returns true if `a` is after `b` (RFC 1982).
fn after(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) > 0
}

impl IscsiQueue {
    pub(super) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    pub(super) fn new(
        stream: TcpStream,
        login: &LoginResult,
        lun: [u8; 8],
        block_size: u32,
        demand: Demand,
    ) -> Result<IscsiQueue> {
        let mut noise = Rng::with_seed(u64::from(demand.slots));
        let slots = (0..demand.slots).map(|_| {
            let mut data = vec![0; demand.largest as usize].into_boxed_slice();
            if !demand.zeroes {
                noise.fill(&mut data);
            }
            Slot {
                data,
                cdb: [0; 16],
                ask: IoKind::Read,
                busy: false,
                length: 0,
                came: 0,
                saved: [0; UNMAP_LIST],
                uses: 0,
            }
        });
        let mut decoder = Decoder::new(0, SEGMENT_BYTES);
        decoder.set_digests(login.connection.digests);
        let max_send = login.connection.peer_max_recv;
        let first = login.session.first_burst_length;
        Ok(IscsiQueue {
            stream,
            lun,
            block_size,
            digests: login.connection.digests,
            max_send,
            immediate: match login.session.immediate_data {
                true => first.min(max_send),
                false => 0,
            },
            unsolicited: if login.session.initial_r2t { 0 } else { first },
            cmd_sn: login.exp_cmd_sn,
            max_cmd_sn: login.max_cmd_sn,
            exp_stat_sn: login.exp_stat_sn,
            slots: slots.collect(),
            waiting: VecDeque::with_capacity(demand.slots.into()),
            outgoing: Outgoing::default(),
            decoder,
            stage: vec![0; STAGE_BYTES].into(),
            from: 0,
            to: 0,
            segment: Vec::new(),
            refused: (0, Vec::new()),
            done: Vec::with_capacity(demand.slots.into()),
        })
    }

    /// Runs one read command and waits for it; for queries before a run.
    pub(super) fn ask(&mut self, cdb: &[u8], length: u32) -> Result<Vec<u8>> {
        let slot = self.slots.first_mut().context("a queue has a slot")?;
        slot.cdb = [0; 16];
        slot.cdb[..cdb.len()].copy_from_slice(cdb);
        (slot.ask, slot.length) = (IoKind::Read, length);
        let until = Instant::now() + PATIENCE;
        // Each of the first commands of a session may end with a unit attention.
        for attempt in 0.. {
            self.enter(0);
            self.publish()?;
            let mut done = Vec::new();
            while done.is_empty() {
                ensure!(Instant::now() < until, "no response from the target");
                self.wait(Duration::from_millis(100))?;
                self.reap(&mut done)?;
            }
            let slot = &self.slots[0];
            // The allocation length is the maximum; less data is valid.
            if done[0].ok || slot.came > 0 {
                return Ok(slot.data[..slot.came as usize].to_vec());
            }
            ensure!(
                attempt < 4,
                "command {:02x}h ends with {}",
                cdb[0],
                scsi_end(self.refused.0, &self.refused.1)
            );
        }
        Ok(Vec::new())
    }

    /// Queues a request.
    #[inline]
    pub fn submit(&mut self, index: u16, ask: IoKind, offset: u64, length: u32) {
        let (block, blocks) = (
            offset / u64::from(self.block_size),
            length / self.block_size,
        );
        let slot = &mut self.slots[usize::from(index)];
        slot.ask = ask;
        slot.length = if ask == IoKind::Flush { 0 } else { length };
        if ask == IoKind::Trim {
            slot.unmap(block, blocks);
            return self.enter(index);
        }
        let wide = u32::try_from(block).is_err() || u16::try_from(blocks).is_err();
        slot.cdb = scsi_cdb(ask, wide, block, blocks);
        self.enter(index);
    }

    fn enter(&mut self, index: u16) {
        let slot = &mut self.slots[usize::from(index)];
        slot.busy = true;
        slot.came = 0;
        slot.uses = slot.uses.wrapping_add(1) & 0x7fff;
        if !self.waiting.is_empty() || after(self.cmd_sn, self.max_cmd_sn) {
            self.waiting.push_back(index);
        } else {
            self.command(index);
        }
    }

    fn command(&mut self, index: u16) {
        let slot = &self.slots[usize::from(index)];
        let length = slot.length;
        let mut header = ScsiCommand {
            lun: self.lun,
            itt: (u32::from(slot.uses) << 16 | u32::from(index)).into(),
            expected_length: length.into(),
            cmd_sn: self.cmd_sn.into(),
            exp_stat_sn: self.exp_stat_sn.into(),
            cdb: slot.cdb,
            ..ScsiCommand::blank()
        };
        self.cmd_sn = self.cmd_sn.wrapping_add(1);
        if length == 0 || slot.ask == IoKind::Read {
            header.flags |= if length > 0 { ScsiCommand::READ } else { 0 };
            return self.queue(header.to_bhs(), None);
        }
        header.flags |= ScsiCommand::WRITE;
        let immediate = self.immediate.min(length);
        let more = self.unsolicited.min(length);
        if more > immediate {
            header.flags &= !FINAL;
        }
        let itt = header.itt.get();
        self.queue(header.to_bhs(), Some((index, 0, immediate)));
        if more > immediate {
            self.data_out(index, itt, NO_TAG, immediate, more);
        }
    }

    /// Queues a sequence of Data-Out PDUs.
    fn data_out(&mut self, index: u16, itt: u32, ttt: u32, from: u32, to: u32) {
        let (mut at, mut number) = (from, 0u32);
        while at < to {
            let next = to.min(at.saturating_add(self.max_send));
            let header = DataOut {
                flags: if next == to { FINAL } else { 0 },
                lun: if ttt == NO_TAG { [0; 8] } else { self.lun },
                itt: itt.into(),
                ttt: ttt.into(),
                exp_stat_sn: self.exp_stat_sn.into(),
                data_sn: number.into(),
                buffer_offset: at.into(),
                ..DataOut::blank()
            };
            self.queue(header.to_bhs(), Some((index, at, next)));
            (at, number) = (next, number.wrapping_add(1));
        }
    }

    fn queue(&mut self, mut header: Bhs, data: Option<(u16, u32, u32)>) {
        let digests = self.digests;
        match data.filter(|(_, from, to)| from < to) {
            // All lengths are multiples of the block size, so there is no padding.
            Some((slot, from, to)) if !digests.data => {
                header.lengths.set_data((to - from) as usize);
                self.outgoing.headers(|bytes| {
                    bytes.extend_from_slice(header.bytes());
                    if digests.header {
                        let crc = iscsi::pdu::crc32c(header.bytes());
                        bytes.extend_from_slice(&crc.to_le_bytes());
                    }
                });
                self.outgoing.data(slot, from, to);
            }
            Some((slot, from, to)) => {
                let data = &self.slots[usize::from(slot)].data[from as usize..to as usize];
                self.outgoing
                    .headers(|bytes| encode(bytes, header, &[], data, digests));
            }
            None => self
                .outgoing
                .headers(|bytes| encode(bytes, header, &[], &[], digests)),
        }
    }

    /// Sends queued segments until the socket blocks.
    #[inline]
    pub fn publish(&mut self) -> Result<()> {
        let slots = &self.slots;
        self.outgoing
            .send(&self.stream, |slot| &slots[usize::from(slot)].data)
    }

    /// Collects completions.
    #[inline]
    pub fn reap(&mut self, done: &mut Vec<Done>) -> Result<()> {
        if !self.outgoing.is_empty() {
            self.publish()?;
        }
        if self.receive()? {
            self.parse()?;
        }
        if !self.outgoing.is_empty() {
            self.publish()?;
        }
        done.append(&mut self.done);
        Ok(())
    }

    /// Returns the destination of the current PDU's data: slot and offset.
    fn destination(&self) -> Option<(usize, usize)> {
        let bhs = self.decoder.bhs();
        (bhs.kind() == Some(Opcode::DataIn)).then(|| {
            let header = DataIn::from_bhs(&bhs);
            let slot = header.itt.get() as u16;
            let end = header.buffer_offset.get() + header.lengths.data();
            (usize::from(slot), (end - self.decoder.data_left()) as usize)
        })
    }

    /// Receives available data. Returns false if there is none.
    fn receive(&mut self) -> Result<bool> {
        let left = self.decoder.data_left() as usize;
        let direct = (left >= DIRECT_BYTES_MIN).then(|| self.destination());
        let got = match direct.flatten() {
            // The header check has verified that the data fits.
            Some((slot, at)) => {
                let data = &mut self.slots[slot].data[at..at + left];
                let mut slices = [IoSliceMut::new(data), IoSliceMut::new(&mut self.stage)];
                (&self.stream).read_vectored(&mut slices)
            }
            None => (&self.stream).read(&mut self.stage),
        };
        let bytes = match got {
            Ok(0) => bail!("the target has closed the connection"),
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) if error.kind() == ErrorKind::Interrupted => return Ok(false),
            Err(error) => return Err(error).context("the connection is lost"),
        };
        (self.from, self.to) = (0, bytes);
        if let Some(Some((slot, at))) = direct {
            let here = bytes.min(left);
            self.decoder
                .take_data(&self.slots[slot].data[at..at + here]);
            self.to -= here;
        }
        Ok(true)
    }

    fn parse(&mut self) -> Result<()> {
        loop {
            let (used, progress) = self.decoder.push(&self.stage[self.from..self.to])?;
            self.from += used;
            match progress {
                Progress::NeedMore(_) => return Ok(()),
                Progress::Header => self.header()?,
                Progress::Data(_) if self.from == self.to => return Ok(()),
                Progress::Data(left) => {
                    let here = (left as usize).min(self.to - self.from);
                    let piece = &self.stage[self.from..self.from + here];
                    match self.destination() {
                        Some((slot, at)) => {
                            self.slots[slot].data[at..at + here].copy_from_slice(piece);
                        }
                        None => self.segment.extend_from_slice(piece),
                    }
                    self.decoder.take_data(piece);
                    self.from += here;
                }
                Progress::End { digest_ok } => {
                    ensure!(digest_ok, "a data digest does not match");
                    self.end()?;
                }
            }
        }
    }

    /// Checks that a Data-In header belongs to a read and that its data is within the slot.
    fn header(&mut self) -> Result<()> {
        self.segment.clear();
        let bhs = self.decoder.bhs();
        if bhs.kind() != Some(Opcode::DataIn) {
            return Ok(());
        }
        let header = DataIn::from_bhs(&bhs);
        let slot = self.find(header.itt.get())?;
        let slot = &mut self.slots[usize::from(slot)];
        let end = header
            .buffer_offset
            .get()
            .checked_add(header.lengths.data());
        ensure!(
            slot.ask == IoKind::Read
                && end.is_some_and(|end| end <= slot.length && end as usize <= slot.data.len()),
            "read data outside of the requested range"
        );
        slot.came += header.lengths.data();
        Ok(())
    }

    fn find(&self, itt: u32) -> Result<u16> {
        let index = itt as u16;
        match self.slots.get(usize::from(index)) {
            Some(slot) if slot.busy && u32::from(slot.uses) == itt >> 16 => Ok(index),
            _ => bail!("a response to an unknown request, tag {itt:#x}"),
        }
    }

    /// Handles the end of a PDU.
    fn end(&mut self) -> Result<()> {
        let bhs = self.decoder.bhs();
        // StatSN, ExpCmdSN and MaxCmdSN have the same offsets in all PDUs from the target.
        let numbers = NopIn::from_bhs(&bhs);
        if after(numbers.max_cmd_sn.get(), self.max_cmd_sn) {
            self.max_cmd_sn = numbers.max_cmd_sn.get();
        }
        match bhs.kind() {
            Some(Opcode::DataIn) => {
                let header = DataIn::from_bhs(&bhs);
                if header.flags & DataIn::STATUS != 0 {
                    self.exp_stat_sn = header.stat_sn.get().wrapping_add(1);
                    self.finish(header.itt.get(), header.status == 0)?;
                }
            }
            Some(Opcode::ScsiResponse) => {
                let header = ScsiResponse::from_bhs(&bhs);
                self.exp_stat_sn = header.stat_sn.get().wrapping_add(1);
                let good = header.response == 0 && header.status == 0;
                if !good {
                    // Sense data follows its length field (RFC 7143, 11.4.7.2).
                    let sense = self.segment.get(2..).unwrap_or_default();
                    self.refused = (header.status, sense.to_vec());
                }
                self.finish(header.itt.get(), good)?;
            }
            Some(Opcode::ReadyToTransfer) => {
                let header = ReadyToTransfer::from_bhs(&bhs);
                let itt = header.itt.get();
                let index = self.find(itt)?;
                let slot = &self.slots[usize::from(index)];
                let from = header.buffer_offset.get();
                let to = from.checked_add(header.desired_length.get());
                let to = to.filter(|to| slot.ask != IoKind::Read && *to <= slot.length);
                let to = to.context("an R2T beyond the data of its request")?;
                self.data_out(index, itt, header.ttt.get(), from, to);
            }
            Some(Opcode::NopIn) if numbers.ttt.get() != NO_TAG => {
                let mut answer = NopOut {
                    ttt: numbers.ttt,
                    lun: numbers.lun,
                    cmd_sn: self.cmd_sn.into(),
                    exp_stat_sn: self.exp_stat_sn.into(),
                    ..NopOut::idle()
                };
                answer.opcode |= IMMEDIATE;
                self.queue(answer.to_bhs(), None);
            }
            Some(Opcode::NopIn) => {}
            kind => bail!("the target sent an unsolicited {kind:?}"),
        }
        while !self.waiting.is_empty() && !after(self.cmd_sn, self.max_cmd_sn) {
            if let Some(index) = self.waiting.pop_front() {
                self.command(index);
            }
        }
        Ok(())
    }

    fn finish(&mut self, itt: u32, good: bool) -> Result<()> {
        let index = self.find(itt)?;
        let slot = &mut self.slots[usize::from(index)];
        slot.busy = false;
        if slot.ask == IoKind::Trim {
            slot.data[..UNMAP_LIST].copy_from_slice(&slot.saved);
        }
        let whole = slot.ask != IoKind::Read || slot.came == slot.length;
        self.done.push(Done {
            slot: index,
            ok: good && whole,
        });
        Ok(())
    }

    /// Waits for the socket.
    pub fn wait(&mut self, limit: Duration) -> Result<()> {
        let mut wanted = PollFlags::IN;
        if !self.outgoing.is_empty() {
            wanted |= PollFlags::OUT;
        }
        let mut waits = [PollFd::new(&self.stream, wanted)];
        // A stop request does not wake this thread, so the wait is short.
        let limit = limit.min(LOOK_UP);
        match poll(&mut waits, Timespec::try_from(limit).ok().as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error).context("cannot wait for the target"),
        }
    }

    /// Writes the data of a slot.
    pub fn write_data(&mut self, slot: u16, data: &[u8]) {
        if let Some(slot) = self.slots.get_mut(usize::from(slot)) {
            slot.data[..data.len()].copy_from_slice(data);
        }
    }

    /// Reads the data of a slot.
    pub fn read_data(&self, slot: u16, into: &mut [u8]) {
        if let Some(slot) = self.slots.get(usize::from(slot)) {
            into.copy_from_slice(&slot.data[..into.len()]);
        }
    }
}
