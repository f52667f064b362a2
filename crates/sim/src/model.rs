//! Permitted values of each block of a disk.
//!
//! A block is a register with concurrent readers and writers. A read may return a value unless a later write certainly completed after
//! the end of that value's write and before the start of the read. After a power cut, only data covered by a flush or by a durable write
//! is certain.

use crate::random::Random;

/// Block size in bytes.
pub const BLOCK: usize = 512;

/// Content of a block: 0 for zeroes, other numbers for distinct patterns.
pub type Value = u64;

/// Fills a block with the pattern of a value.
pub fn fill(block: &mut [u8], value: Value, lba: u64) {
    for (index, word) in block.chunks_exact_mut(8).enumerate() {
        let content = match (value, index) {
            (0, _) => 0,
            (_, 0) => value,
            _ => mix(value, lba, index as u64),
        };
        word.copy_from_slice(&content.to_le_bytes());
    }
}

/// Returns the value of a block, or an error that describes other content.
pub fn value_of(block: &[u8], lba: u64) -> Result<Value, String> {
    let word = |index: usize| {
        let bytes = block[8 * index..8 * index + 8].try_into();
        u64::from_le_bytes(bytes.expect("eight bytes"))
    };
    let value = word(0);
    let expected = |index: usize| match value {
        0 => 0,
        _ => mix(value, lba, index as u64),
    };
    match (1..block.len() / 8).find(|index| word(*index) != expected(*index)) {
        None => Ok(value),
        Some(1) => Err(format!(
            "content of another block, or content never written: it begins with {value:#x}"
        )),
        Some(at) => Err(format!(
            "the first {} bytes of value {value}, then other bytes",
            8 * at
        )),
    }
}

fn mix(value: u64, lba: u64, index: u64) -> u64 {
    (value ^ (lba << 40) ^ (index << 56)).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}

#[derive(Clone, Copy, Debug)]
struct Write {
    value: Value,
    begin: u64,
    /// `None` while in flight.
    end: Option<u64>,
    /// The write took effect. A failed write may or may not have taken effect.
    certain: bool,
    /// The write survives a power cut.
    durable: bool,
    /// For COMPARE AND WRITE: the compared value, and the time at which that value was written.
    compared: Option<(Value, u64)>,
}

impl Write {
    fn is_before(&self, other: &Write) -> bool {
        let Some(end) = self.end else {
            return false;
        };
        // The compared value was still present when the command took effect, so no other write came between.
        let is_atomic = |(value, written): (Value, u64)| {
            written < other.begin && value != other.value && self.begin != other.begin
        };
        end < other.begin || self.certain && self.compared.is_some_and(is_atomic)
    }
}

#[derive(Clone, Debug)]
struct Block {
    writes: Vec<Write>,
}

/// Expected content of a disk. Times are numbers of events.
#[derive(Clone, Debug)]
pub struct Model {
    blocks: Vec<Block>,
}

impl Model {
    /// Creates a model with initial values.
    pub fn new(values: impl Iterator<Item = Value>) -> Model {
        let block = |value| Block {
            writes: vec![settled(value)],
        };
        Model {
            blocks: values.map(block).collect(),
        }
    }

    pub fn len(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// Resizes the disk; new blocks are zero.
    pub fn resize(&mut self, blocks: u64) {
        let new = Block {
            writes: vec![settled(0)],
        };
        self.blocks.resize(blocks as usize, new);
    }

    pub fn begin(&mut self, lba: u64, value: Value, now: u64) {
        self.blocks[lba as usize].writes.push(Write {
            value,
            begin: now,
            end: None,
            certain: false,
            durable: false,
            compared: None,
        });
    }

    /// Begins a COMPARE AND WRITE.
    pub fn begin_compare(&mut self, lba: u64, expected: Value, value: Value, now: u64) {
        let writes = &self.blocks[lba as usize].writes;
        // Zeroes may have been written more than once.
        let of = writes
            .iter()
            .find(|write| expected > 0 && write.value == expected);
        let written = of.and_then(|write| write.end);
        self.begin(lba, value, now);
        if let Some(write) = self.blocks[lba as usize].writes.last_mut() {
            write.compared = written.map(|end| (expected, end));
        }
    }

    /// Ends a write.
    pub fn end(&mut self, lba: u64, begun: u64, now: u64, done: bool, durable: bool) {
        let Some(block) = self.blocks.get_mut(lba as usize) else {
            return;
        };
        for write in &mut block.writes {
            if write.begin == begun {
                write.end = Some(now);
                (write.certain, write.durable) = (done, done && durable);
            }
        }
    }

    /// Removes a rejected write: no read may return it.
    pub fn refused(&mut self, lba: u64, begun: u64) {
        if let Some(block) = self.blocks.get_mut(lba as usize) {
            block.writes.retain(|write| write.begin != begun);
        }
    }

    /// Forgets values that no read beginning at `oldest` or later can return and that are on no medium.
    pub fn prune(&mut self, lba: u64, oldest: u64) {
        let Some(block) = self.blocks.get_mut(lba as usize) else {
            return;
        };
        let covered: Vec<Write> = block
            .writes
            .iter()
            .filter(|write| {
                write.certain && write.durable && write.end.is_some_and(|end| end < oldest)
            })
            .copied()
            .collect();
        block
            .writes
            .retain(|write| !covered.iter().any(|other| write.is_before(other)));
    }

    /// Applies a completed flush that began at `begun`.
    pub fn flushed(&mut self, begun: u64) {
        for block in &mut self.blocks {
            for write in &mut block.writes {
                write.durable |= write.certain && write.end.is_some_and(|end| end < begun);
            }
        }
    }

    /// Returns an error if a read that began at `begun` and ends now may not return this value.
    pub fn check(&self, lba: u64, value: Value, begun: u64) -> Result<(), String> {
        let Some(block) = self.blocks.get(lba as usize) else {
            return Ok(());
        };
        let before = |write: &&Write| write.certain && write.end.is_some_and(|end| end < begun);
        let covers: Vec<&Write> = block.writes.iter().filter(before).collect();
        let is_left = |write: &&Write| !covers.iter().any(|other| write.is_before(other));
        let left = block.writes.iter().filter(is_left);
        let known: Vec<Value> = left.map(|write| write.value).collect();
        if known.contains(&value) {
            return Ok(());
        }
        Err(format!("found value {value}, allowed {known:?}"))
    }

    /// Applies a kill or a power cut. Writes in flight become uncertain; after a power cut, so do writes that were not durable.
    /// `survive`: start times of writes that continue in the next life.
    pub fn crashed(&mut self, now: u64, power: bool, survive: &[u64]) {
        for block in &mut self.blocks {
            if power {
                let covered: Vec<Write> = block
                    .writes
                    .iter()
                    .filter(|write| write.durable)
                    .copied()
                    .collect();
                block
                    .writes
                    .retain(|write| !covered.iter().any(|other| write.is_before(other)));
            }
            for write in &mut block.writes {
                if write.end.is_none() && !survive.contains(&write.begin) {
                    write.end = Some(now);
                }
                write.certain &= !power;
            }
        }
    }

    /// Discards the content of a disk that is lost with the process.
    pub fn lose(&mut self) {
        for block in &mut self.blocks {
            block.writes.retain(|write| write.end.is_none());
            block.writes.push(settled(0));
        }
    }

    /// Returns one of the permitted values of a block.
    pub fn any_value(&self, lba: u64, random: &mut Random) -> Value {
        let writes = &self.blocks[lba as usize].writes;
        writes[random.below(writes.len() as u64) as usize].value
    }

    /// Fixes the value of a block that was read after a crash.
    pub fn found(&mut self, lba: u64, value: Value) {
        self.blocks[lba as usize].writes = vec![settled(value)];
    }
}

fn settled(value: Value) -> Write {
    Write {
        value,
        begin: 0,
        end: Some(0),
        certain: true,
        durable: true,
        compared: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_returns_data_valid_since_its_start() {
        let mut model = Model::new([7].into_iter());
        model.begin(0, 8, 10);
        assert!(model.check(0, 7, 11).is_ok() && model.check(0, 8, 11).is_ok());
        model.end(0, 10, 20, true, false);
        assert!(model.check(0, 7, 15).is_ok(), "it may have come before");
        assert!(model.check(0, 7, 21).is_err() && model.check(0, 8, 21).is_ok());
        assert!(model.check(0, 9, 21).is_err());
    }

    #[test]
    fn power_cut_leaves_flushed_or_later_content() {
        let mut model = Model::new([1].into_iter());
        model.begin(0, 2, 10);
        model.end(0, 10, 11, true, false);
        model.flushed(12);
        model.begin(0, 3, 20);
        model.end(0, 20, 21, true, false);
        // The flush began before the second write ended.
        model.flushed(20);
        let mut killed = model.clone();
        model.crashed(30, true, &[]);
        assert!(model.check(0, 1, 31).is_err());
        assert!(model.check(0, 2, 31).is_ok() && model.check(0, 3, 31).is_ok());
        killed.crashed(30, false, &[]);
        assert!(killed.check(0, 2, 31).is_err() && killed.check(0, 3, 31).is_ok());
    }

    #[test]
    fn failed_write_may_have_been_done() {
        let mut model = Model::new([1].into_iter());
        model.begin(0, 2, 10);
        model.end(0, 10, 11, false, false);
        assert!(model.check(0, 1, 12).is_ok() && model.check(0, 2, 12).is_ok());
        model.begin(0, 3, 20);
        model.end(0, 20, 21, true, true);
        assert!(model.check(0, 2, 22).is_err());
    }

    #[test]
    fn write_beside_compare_and_write_comes_after_it() {
        let mut model = Model::new([1].into_iter());
        model.begin_compare(0, 1, 2, 10);
        model.begin(0, 3, 11);
        model.end(0, 10, 20, true, false);
        model.end(0, 11, 21, true, false);
        assert!(model.check(0, 3, 22).is_ok());
        assert!(model.check(0, 2, 22).is_err(), "the write was lost");
    }

    #[test]
    fn value_of_another_block_is_detected() {
        let mut block = [0; BLOCK];
        fill(&mut block, 5, 3);
        assert_eq!(value_of(&block, 3), Ok(5));
        assert!(value_of(&block, 4).is_err());
        block[300] ^= 1;
        assert!(value_of(&block, 3).is_err());
        assert_eq!(value_of(&[0; BLOCK], 9), Ok(0));
    }
}
