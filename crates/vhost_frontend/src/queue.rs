//! One vring from the driver's side: the ring in memory, its kick and its interrupt.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use virtqueue::driver::{DriverConfig, DriverQueue, IndirectTables, RawRing, RingLayout, Used};
use virtqueue::layout::MAX_SIZE;

use crate::channel::readable;
use crate::session::{FrontEnd, feature};
use crate::{Error, Result};

/// Options of a queue.
#[derive(Clone, Copy, Debug)]
pub struct QueueOptions {
    /// Ring size.
    pub size: u16,
    /// Descriptors per indirect table; `None`: direct chains.
    pub indirect: Option<u16>,
    /// Poll; the back end need not interrupt.
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

/// A running vring. It may be driven from another thread than its session.
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
    pub(crate) fn allocate(
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

    /// Returns the queue index.
    pub fn index(&self) -> u16 {
        self.index
    }

    /// Returns the addresses of the ring.
    pub fn layout(&self) -> &RingLayout {
        &self.layout
    }

    /// Returns the start of a new ring, in the format of `SET_VRING_BASE`.
    pub fn base(&self) -> u32 {
        if self.layout.packed {
            virtqueue::PACKED_START
        } else {
            0
        }
    }

    /// Returns unchecked access to the ring.
    pub fn raw(&self) -> &RawRing {
        &self.raw
    }

    /// Returns the driver side.
    pub fn driver(&mut self) -> &mut DriverQueue {
        &mut self.driver
    }

    /// Returns the kick descriptor.
    pub fn kick_fd(&self) -> &OwnedFd {
        &self.kick
    }

    /// Returns the interrupt descriptor.
    pub fn call(&self) -> &OwnedFd {
        &self.call
    }

    /// Replaces the interrupt descriptor. The session must send it to the back end.
    pub fn replace_call(&mut self) -> Result<()> {
        self.call = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(())
    }

    /// Returns the number of kicks.
    pub fn kicks(&self) -> u64 {
        self.kicks
    }

    /// Adds a chain. Returns false if the ring has no room. The device sees it after [`Queue::publish`].
    #[inline]
    pub fn add(&mut self, readable: &[(u64, u32)], writable: &[(u64, u32)], token: u64) -> bool {
        if self.indirect {
            self.driver.add_indirect(readable, writable, token)
        } else {
            self.driver.add(readable, writable, token)
        }
        .is_some()
    }

    /// Makes added chains visible to the device, and kicks if the device wants it.
    #[inline]
    pub fn publish(&mut self) {
        if self.driver.publish() {
            self.kick();
        }
    }

    /// Sends a kick.
    pub fn kick(&mut self) {
        self.kicks += 1;
        // A full counter means that a kick is already pending.
        rustix::io::write(&self.kick, &1u64.to_ne_bytes()).ok();
    }

    /// Returns a completed chain.
    #[inline]
    pub fn pop_used(&mut self) -> Option<Used> {
        self.driver.pop_used()
    }

    /// Waits for a completed chain.
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
                // The descriptor is readable, and this thread is its only reader.
                rustix::io::read(&self.call, &mut [0u8; 8]).ok();
            }
        }
    }
}
