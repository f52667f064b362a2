//! One vring from the driver's side: the ring in memory, its kick and its interrupt.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use virtqueue::driver::{DriverConfig, DriverQueue, IndirectTables, RawRing, RingLayout, Used};
use virtqueue::layout::MAX_SIZE;

use crate::channel::readable;
use crate::session::{FrontEnd, feature};
use crate::{Error, Result};

/// How a queue is used.
#[derive(Clone, Copy, Debug)]
pub struct QueueOptions {
    /// Entries.
    pub size: u16,
    /// Descriptors of an indirect table; `None`: chains are direct.
    pub indirect: Option<u16>,
    /// Never sleep: the back end need not interrupt.
    pub polled: bool,
}

impl Default for QueueOptions {
    fn default() -> Self {
        QueueOptions {
            size: 128,
            indirect: None,
            polled: false,
        }
    }
}

/// A vring in use. It may be driven from another thread than its session.
pub struct Queue {
    index: u16,
    layout: RingLayout,
    driver: DriverQueue,
    raw: RawRing,
    indirect: bool,
    polled: bool,
    kick: OwnedFd,
    call: OwnedFd,
    kicks: u64,
}

impl Queue {
    pub(crate) fn place(
        front_end: &mut FrontEnd,
        index: u16,
        options: &QueueOptions,
    ) -> Result<Queue> {
        let packed = front_end.has(feature::RING_PACKED);
        assert!(options.size <= MAX_SIZE, "queue of {}", options.size);
        let bytes = RingLayout::at(0, options.size, packed).end as usize;
        let ring = front_end.allocate(bytes, 4096)?;
        let layout = RingLayout::at(ring.address, options.size, packed);
        let mut tables = None;
        if let Some(descriptors) = options.indirect {
            let mut wanted = IndirectTables {
                address: 0,
                descriptors,
            };
            let bytes = wanted.bytes(options.size) as usize;
            wanted.address = front_end.allocate(bytes, 64)?.address;
            tables = Some(wanted);
        }
        let config = DriverConfig {
            event_idx: front_end.has(feature::EVENT_IDX),
            tables,
            ..DriverConfig::new(layout)
        };
        let table = front_end.table()?;
        let mut driver = DriverQueue::new(config, &table)?;
        if options.polled {
            driver.disable_interrupts();
        }
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Queue {
            index,
            layout,
            driver,
            raw: RawRing::new(&layout, &table)?,
            indirect: tables.is_some(),
            polled: options.polled,
            kick: eventfd(0, flags)?,
            call: eventfd(0, flags)?,
            kicks: 0,
        })
    }

    /// The queue's number.
    pub fn index(&self) -> u16 {
        self.index
    }

    /// Where the ring lies.
    pub fn layout(&self) -> &RingLayout {
        &self.layout
    }

    /// Where a new ring begins, as `SET_VRING_BASE` has it.
    pub fn base(&self) -> u32 {
        if self.layout.packed {
            virtqueue::PACKED_START
        } else {
            0
        }
    }

    /// The ring's bare fields.
    pub fn raw(&self) -> &RawRing {
        &self.raw
    }

    /// The driver side.
    pub fn driver(&mut self) -> &mut DriverQueue {
        &mut self.driver
    }

    /// The kick's descriptor.
    pub fn kick_fd(&self) -> &OwnedFd {
        &self.kick
    }

    /// The interrupt's descriptor.
    pub fn call(&self) -> &OwnedFd {
        &self.call
    }

    /// Replaces the interrupt; the session has to tell the back end.
    pub fn replace_call(&mut self) -> Result<()> {
        self.call = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(())
    }

    /// Kicks sent so far.
    pub fn kicks(&self) -> u64 {
        self.kicks
    }

    /// Adds a chain; false where the ring has no room. Seen after [`Queue::publish`].
    #[inline]
    pub fn add(&mut self, readable: &[(u64, u32)], writable: &[(u64, u32)], token: u64) -> bool {
        if self.indirect {
            self.driver.add_indirect(readable, writable, token)
        } else {
            self.driver.add(readable, writable, token)
        }
        .is_some()
    }

    /// Shows the device what was added, and kicks where it wants to be.
    #[inline]
    pub fn publish(&mut self) {
        if self.driver.publish() {
            self.kick();
        }
    }

    /// Kicks.
    pub fn kick(&mut self) {
        self.kicks += 1;
        // A full counter means that a kick is pending anyway.
        rustix::io::write(&self.kick, &1u64.to_ne_bytes()).ok();
    }

    /// Takes a chain that came back.
    #[inline]
    pub fn pop_used(&mut self) -> Option<Used> {
        self.driver.pop_used()
    }

    /// Waits until a chain has come back.
    pub fn wait(&mut self, limit: Duration) -> Result<()> {
        let until = Instant::now() + limit;
        loop {
            if self.driver.has_used() || (!self.polled && self.driver.enable_interrupts()) {
                return Ok(());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Timeout(limit));
            }
            if self.polled {
                std::thread::yield_now();
            } else if readable(&self.call, left)? {
                // Nobody else reads it; it was just found readable.
                rustix::io::read(&self.call, &mut [0u8; 8]).ok();
            }
        }
    }
}
