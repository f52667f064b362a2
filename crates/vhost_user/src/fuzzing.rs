//! Arbitrary bytes as a front end's messages: the body of the fuzz target and of a test.
//!
//! The bytes select a mix of valid and invalid messages, so that rings are started, changed and stopped. For any input, nothing panics,
//! nothing waits endlessly, and no queue is left at the end.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use guest_memory::Mapping;
use reactor::Pool;
use rustix::event::{EventfdFlags, eventfd};
use vhost_user_wire::{encode, stream};
use virtio_device::VirtioDevice;

use crate::dispatch::Dispatcher;
use crate::session::Session;

/// Length of the front end's memory: room for rings and requests.
const MEMORY: usize = 1 << 16;
/// Guest-physical address and user address of the memory.
const GUEST: u64 = 0x1_0000;
const USER: u64 = 0x7000_0000;

/// Reads bytes from the input, then zeroes.
struct Choices<'a>(&'a [u8]);

impl<'a> Choices<'a> {
    fn byte(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or(0)
    }

    fn word(&mut self) -> u64 {
        u64::from(self.byte()) | u64::from(self.byte()) << 8
    }

    fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }
}

/// Runs a session on messages made of `data`.
///
/// # Panics
/// If the session does something that no front end may cause.
pub fn messages(device: &Arc<dyn VirtioDevice>, pool: &Arc<Pool>, data: &[u8]) {
    let (server_end, mut client_end) = UnixStream::pair().expect("a pair of sockets");
    let (mapping, memory) = Mapping::memfd("fuzzing", MEMORY).expect("a memfd");
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
    client_end.set_nonblocking(true).expect("a socket");
    let session = Session::new(
        device.clone(),
        pool.clone(),
        Arc::new(|_, _| {}),
        Arc::default(),
        Arc::default(),
    );
    let mut dispatcher = Dispatcher::new(server_end, session);
    let mut choices = Choices(data);
    'messages: while !choices.0.is_empty() {
        let mut front_end = FrontEnd {
            choices: &mut choices,
            mapping: &mapping,
            memory: &memory,
            event: &event,
        };
        let (bytes, fds) = front_end.message();
        if stream::send(&client_end, &bytes, &fds).is_err() {
            break;
        }
        // Answers are discarded, so that the session never waits to send one.
        while rustix::io::ioctl_fionread(&dispatcher.stream).is_ok_and(|available| available > 0) {
            // The rest of an incomplete message will not be sent.
            if dispatcher.handle_next(Duration::ZERO).is_err() {
                break 'messages;
            }
            while client_end.read(&mut [0; 4096]).is_ok_and(|n| n > 0) {}
        }
        // Kicks need no message.
        (&File::from(event.try_clone().expect("a descriptor")))
            .write_all(&1u64.to_ne_bytes())
            .ok();
    }
    let ran = dispatcher.session.runs();
    dispatcher.session.stop_vrings();
    if ran {
        let left = pool
            .workers()
            .into_iter()
            .map(|worker| worker.call(|w| w.source_count()));
        assert_eq!(left.flatten().sum::<usize>(), 0, "queues are left behind");
    }
}

struct FrontEnd<'a, 'b> {
    choices: &'a mut Choices<'b>,
    mapping: &'a Mapping,
    memory: &'a File,
    event: &'a OwnedFd,
}

impl<'a> FrontEnd<'a, '_> {
    /// Returns the next message and its descriptors.
    fn message(&mut self) -> (Vec<u8>, Vec<BorrowedFd<'a>>) {
        let (memory, event) = (self.memory.as_fd(), self.event.as_fd());
        let kind = self.choices.byte();
        let flags = if kind & 0x80 == 0 { 1 } else { 9 };
        let index = u64::from(self.choices.byte() & 3);
        let (request, payload, fds): (u32, Vec<u64>, Vec<BorrowedFd<'a>>) = match kind & 0x1f {
            0 => return self.raw(),
            1 => (1, vec![], vec![]),
            2 => (2, vec![1 << 32 | self.features()], vec![]),
            3 => (3, vec![], vec![]),
            4 => (4, vec![], vec![]),
            5 | 6 => (5, vec![1, GUEST, MEMORY as u64, USER, 0], vec![memory]),
            7 | 8 => (
                8,
                vec![index | (self.choices.word() & 0x1fff) << 32],
                vec![],
            ),
            9 | 10 => {
                let mut address = || USER + (self.choices.word() << 2);
                let addresses = [address(), address(), address()];
                let [descriptor, used, available] = addresses;
                // The low bits of an address vary the log flag and the log address.
                let logged = (used >> 2 & 1) << 32;
                let log = used.wrapping_sub(USER).wrapping_add(GUEST);
                (
                    9,
                    vec![index | logged, descriptor, used, available, log],
                    vec![],
                )
            }
            11 => (10, vec![index | self.choices.word() << 32], vec![]),
            12 => (11, vec![index], vec![]),
            13 | 14 => (12, vec![index], vec![event]),
            15 => (12, vec![index | 1 << 8], vec![]),
            16 => (13, vec![index], vec![event]),
            17 => (14, vec![index], vec![event]),
            18 => (15, vec![], vec![]),
            19 => (16, vec![0xa229], vec![]),
            20 => (17, vec![], vec![]),
            21 | 22 => (18, vec![index | 1 << 32], vec![]),
            23 => (18, vec![index], vec![]),
            24 => return self.config(),
            25 => (34, vec![], vec![]),
            26 => {
                let at = GUEST + self.choices.word() * 4096;
                let size = self.choices.word().min(16) * 4096;
                (37, vec![0, at, size, USER + at, 0], vec![memory])
            }
            28 => {
                let (size, offset) = (self.choices.word(), self.choices.word());
                (6, vec![size, offset], vec![memory])
            }
            29 => (7, vec![], vec![event]),
            27 => (38, vec![0, GUEST, MEMORY as u64, USER, 0], vec![]),
            _ => {
                // A change of memory instead of a message.
                let at = (self.choices.word() << 2) as usize % (MEMORY - 256);
                let count = usize::from(self.choices.byte());
                self.mapping.write(at, self.choices.take(count));
                (20, vec![], vec![])
            }
        };
        let payload: Vec<u8> = payload.into_iter().flat_map(u64::to_ne_bytes).collect();
        (encode(request, flags, &payload), fds)
    }

    fn features(&mut self) -> u64 {
        let bits = u64::from(self.choices.byte());
        (bits & 1) << 28
            | (bits >> 1 & 1) << 29
            | (bits >> 2 & 1) << 30
            | (bits >> 3 & 1) << 34
            | (bits >> 4 & 1) << 26
    }

    fn config(&mut self) -> (Vec<u8>, Vec<BorrowedFd<'a>>) {
        let request = 24 + u32::from(self.choices.byte() & 1);
        let (offset, size) = (self.choices.word() as u32, u32::from(self.choices.byte()));
        let mut payload = [offset, size, 0].map(u32::to_ne_bytes).concat();
        payload.extend(self.choices.take(size as usize));
        (encode(request, 0, &payload), vec![])
    }

    /// Returns raw bytes with up to 40 descriptors.
    fn raw(&mut self) -> (Vec<u8>, Vec<BorrowedFd<'a>>) {
        let fds = vec![self.memory.as_fd(); usize::from(self.choices.byte() % 41)];
        let (request, flags) = (
            u32::from(self.choices.byte()),
            u32::from(self.choices.byte()),
        );
        let size = usize::from(self.choices.byte());
        let payload = self.choices.take(size);
        let mut bytes = encode(request, flags, payload);
        // Any version.
        bytes[4..8].copy_from_slice(&flags.to_ne_bytes());
        if flags & 0x40 != 0 {
            // Half a message, or an invalid size.
            bytes.truncate(size.max(1));
        }
        (bytes, fds)
    }
}
