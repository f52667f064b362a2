//! Verified I/O: every written block reads back with its last content, regardless of other activity.

use fastrand::Rng;

use crate::block::{BlkDone, BlkQueue, kind, status};
use crate::{Error, Result};

const BLOCK: usize = 4096;

/// Expected content of a range of a disk.
pub struct Verifier {
    first: u64,
    /// Number of writes per block; 0: content unknown.
    generations: Vec<u32>,
    random: Rng,
    requests: u64,
}

impl Verifier {
    /// Creates a verifier for `blocks` blocks of 4096 bytes from byte `offset` on.
    pub fn new(offset: u64, blocks: usize, seed: u64) -> Verifier {
        Verifier {
            first: offset / BLOCK as u64,
            generations: vec![0; blocks],
            random: Rng::with_seed(seed),
            requests: 0,
        }
    }

    /// Returns the number of verified requests.
    pub fn requests(&self) -> u64 {
        self.requests
    }

    fn pattern(&self, block: usize) -> [u8; BLOCK] {
        let seed = (self.first + block as u64) << 32 | u64::from(self.generations[block]);
        let seed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut bytes = [0; BLOCK];
        for (at, to) in bytes.chunks_exact_mut(8).enumerate() {
            to.copy_from_slice(&(seed ^ at as u64).to_le_bytes());
        }
        bytes
    }

    /// Runs one batch of concurrent requests, half of them writes. Returns when all are verified.
    pub fn round(&mut self, queue: &mut BlkQueue, depth: u16) -> Result<()> {
        self.round_with(queue, depth, BlkQueue::wait)
    }

    /// As [`Verifier::round`], with a custom `wait` for the next completed request, which may reconnect the queue.
    pub fn round_with(
        &mut self,
        queue: &mut BlkQueue,
        depth: u16,
        mut wait: impl FnMut(&mut BlkQueue) -> Result<BlkDone>,
    ) -> Result<()> {
        let mut busy = vec![None; usize::from(queue.depth())];
        let mut touched = Vec::new();
        let mut count = 0;
        while count < depth {
            let Some(slot) = queue.take() else { break };
            let block = self.random.usize(..self.generations.len());
            if touched.contains(&block) {
                queue.release(slot);
                break;
            }
            touched.push(block);
            let sector = (self.first + block as u64) * (BLOCK as u64 / 512);
            let write = self.generations[block] == 0 || self.random.bool();
            let added = if write {
                self.generations[block] = self.generations[block].wrapping_add(1).max(1);
                queue.data(slot).write(0, &self.pattern(block));
                queue.submit(slot, kind::OUT, sector, BLOCK, 0)
            } else {
                queue.data(slot).write(0, &[0xee; BLOCK]);
                queue.submit(slot, kind::IN, sector, 0, BLOCK)
            };
            if !added {
                return Err(Error::Wrong("the ring has no room".into()));
            }
            busy[usize::from(slot)] = Some((block, write));
            count += 1;
        }
        queue.publish();
        for _ in 0..count {
            let done = wait(queue)?;
            let Some((block, write)) = busy[usize::from(done.slot)].take() else {
                return Err(Error::Wrong("a request completed twice".into()));
            };
            if done.status != status::OK {
                return Err(Error::Wrong(format!(
                    "block {block}, write {write}: status {}",
                    done.status
                )));
            }
            if !write {
                let mut actual = vec![0; BLOCK];
                queue.data(done.slot).read(0, &mut actual);
                self.compare(block, &actual)?;
            }
            queue.release(done.slot);
            self.requests += 1;
        }
        Ok(())
    }

    /// Reads and checks every block that was written.
    pub fn check_all(&mut self, queue: &mut BlkQueue) -> Result<()> {
        for block in 0..self.generations.len() {
            if self.generations[block] == 0 {
                continue;
            }
            let mut actual = vec![0; BLOCK];
            let offset = (self.first + block as u64) * BLOCK as u64;
            if queue.read(offset, &mut actual)? != status::OK {
                return Err(Error::Wrong(format!("block {block} cannot be read")));
            }
            self.compare(block, &actual)?;
        }
        Ok(())
    }

    fn compare(&self, block: usize, actual: &[u8]) -> Result<()> {
        let expected = self.pattern(block);
        if expected[..] == *actual {
            return Ok(());
        }
        let at = expected
            .iter()
            .zip(actual)
            .position(|(a, b)| a != b)
            .unwrap_or(0);
        Err(Error::Wrong(format!(
            "block {block} differs at byte {at}: {:#x}, not {:#x}",
            actual[at], expected[at]
        )))
    }
}
