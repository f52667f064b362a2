//! `discard`: a layer that passes discards on, writes zeroes instead, or ignores them. It preserves promises to clients when a disk moves:
//! block devices may return anything for discarded blocks, therefore zeroes are written.
//!
//! Rejected: the same inside `file`. Remote units and RBD images lack these abilities too.

use std::io;
use std::sync::Arc;

pub use block::DiscardMode;
use block::{DiskInfo, IoFlags, IoKind, IoRequest};
use guest_memory::IoBuffer;
use uring::{Completion, Ring};

use crate::admit::Limits;
use crate::{Attach, BlockDevice, Finished, IoChannel, Layer, Prefetch, Submission, Tag};

/// Adds the layer for a mode, unless the device behaves so already or is never written.
pub fn with_discard(mode: DiscardMode, device: Arc<dyn BlockDevice>) -> Arc<dyn BlockDevice> {
    let info = device.info();
    let by_itself = info.discard_granularity.is_some() && info.discard_zeroes;
    match mode {
        DiscardMode::Unmap => device,
        DiscardMode::Zeroes if by_itself || !info.write_zeroes => device,
        _ if info.read_only || info.passthrough.is_some() => device,
        mode => Arc::new(Discarding {
            limits: Limits::of(&shown(mode, info), device.capacity()),
            inner: device,
            mode,
        }),
    }
}

fn shown(mode: DiscardMode, inner: DiskInfo) -> DiskInfo {
    let granularity = inner.discard_granularity;
    DiskInfo {
        discard_granularity: Some(granularity.unwrap_or(inner.physical_block_size)),
        discard_zeroes: mode == DiscardMode::Zeroes,
        anchors: false,
        ..inner
    }
}

/// The layer `discard`.
struct Discarding {
    inner: Arc<dyn BlockDevice>,
    mode: DiscardMode,
    limits: Limits,
}

impl Layer for Discarding {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.inner
    }

    fn layer_kind(&self) -> &'static str {
        "discard"
    }

    fn layer_info(&self, inner: DiskInfo) -> DiskInfo {
        shown(self.mode, inner)
    }

    fn attach_layer(&self, attach: &mut Attach<'_>) -> io::Result<Box<dyn IoChannel>> {
        Ok(Box::new(DiscardingChannel {
            inner: self.inner.attach(attach)?,
            mode: self.mode,
            limits: self.limits.clone(),
        }))
    }
}

struct DiscardingChannel {
    inner: Box<dyn IoChannel>,
    mode: DiscardMode,
    limits: Limits,
}

impl IoChannel for DiscardingChannel {
    fn submit(
        &mut self,
        ring: &mut Ring,
        io: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
    ) -> Submission {
        if io.kind != IoKind::Discard {
            return self.inner.submit(ring, io, buffer, tag);
        }
        if let Err(refused) = self.limits.admit(io) {
            return Submission::Done(Err(refused));
        }
        if self.mode == DiscardMode::Ignore || io.length == 0 {
            return Submission::Done(Ok(()));
        }
        let zeroes = IoRequest {
            kind: IoKind::WriteZeroes,
            ..io.flagged(IoFlags::UNMAP)
        };
        self.inner.submit(ring, &zeroes, buffer, tag)
    }

    fn wants_prefetch(&self) -> bool {
        self.inner.wants_prefetch()
    }

    fn prefetch(&self, io: &IoRequest, soon: Prefetch) {
        self.inner.prefetch(io, soon);
    }

    fn borrow(&self, io: &IoRequest, buffer: &mut IoBuffer) -> bool {
        self.inner.borrow(io, buffer)
    }

    fn is_borrowed(&self) -> bool {
        self.inner.is_borrowed()
    }

    fn complete(&mut self, ring: &mut Ring, completion: Completion, finished: &mut Vec<Finished>) {
        self.inner.complete(ring, completion, finished);
    }

    fn abort(&mut self, ring: &mut Ring, tag: Tag) {
        self.inner.abort(ring, tag);
    }

    fn close(&mut self, ring: &mut Ring) {
        self.inner.close(ring);
    }

    fn is_closed(&self) -> bool {
        self.inner.is_closed()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }
}
