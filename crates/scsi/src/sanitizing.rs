//! Saved state of a sanitize or format operation, which continues after a restart (SBC-4, 4.11).
//!
//! Saved at the start, after each pass, and at a failure; removed after success, or when a failure is left. An interrupted pass starts from
//! its beginning.

use crate::unit_state::Operation;

/// Operation on every block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    /// Writes this block.
    Write(Vec<u8>),
    WriteZeroes,
    Discard,
}

/// A sanitize or format operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SavedOperation {
    pub operation: Operation,
    pub failed: bool,
    /// AUSE: a failure may be left without another operation.
    pub may_exit: bool,
    /// Index of the current pass.
    pub pass: usize,
    pub passes: Vec<Pass>,
}

const VERSION: u8 = 1;
const FAILED: u8 = 1;
const MAY_EXIT: u8 = 2;
/// Flag of a format operation; otherwise it is a sanitize operation.
const IS_FORMAT: u8 = 4;

impl SavedOperation {
    pub fn encode(&self) -> Vec<u8> {
        let failed = if self.failed { FAILED } else { 0 };
        let may_exit = if self.may_exit { MAY_EXIT } else { 0 };
        let is_format = match self.operation {
            Operation::Sanitize => 0,
            Operation::Format => IS_FORMAT,
        };
        let flags = failed | may_exit | is_format;
        let mut bytes = vec![VERSION, flags, self.pass as u8];
        for pass in &self.passes {
            let (kind, block): (u8, &[u8]) = match pass {
                Pass::Write(block) => (0, block),
                Pass::WriteZeroes => (1, &[]),
                Pass::Discard => (2, &[]),
            };
            bytes.push(kind);
            bytes.extend((block.len() as u32).to_be_bytes());
            bytes.extend_from_slice(block);
        }
        bytes
    }

    /// Decodes the saved operation, if any. Malformed bytes count as a failure that may not be left: parts of the medium may not have been
    /// erased.
    pub fn decode(bytes: &[u8], block_size: usize) -> Option<SavedOperation> {
        if bytes.is_empty() {
            return None;
        }
        let unreadable = SavedOperation {
            operation: Operation::Sanitize,
            failed: true,
            may_exit: false,
            pass: 0,
            passes: Vec::new(),
        };
        Some(SavedOperation::parse(bytes, block_size).unwrap_or(unreadable))
    }

    fn parse(bytes: &[u8], block_size: usize) -> Option<SavedOperation> {
        let (&[version, flags, pass], mut rest) = bytes.split_first_chunk::<3>()?;
        let mut passes = Vec::new();
        while let Some((&[kind, length @ ..], after)) = rest.split_first_chunk::<5>() {
            let length = usize::try_from(u32::from_be_bytes(length)).ok()?;
            let (block, after) = after.split_at_checked(length)?;
            rest = after;
            passes.push(match (kind, length) {
                (0, length) if length == block_size => Pass::Write(block.to_vec()),
                (1, 0) => Pass::WriteZeroes,
                (2, 0) => Pass::Discard,
                _ => return None,
            });
        }
        let pass = usize::from(pass);
        (version == VERSION && rest.is_empty() && pass <= passes.len()).then_some(SavedOperation {
            operation: match flags & IS_FORMAT {
                0 => Operation::Sanitize,
                _ => Operation::Format,
            },
            failed: flags & FAILED != 0,
            may_exit: flags & MAY_EXIT != 0,
            pass,
            passes,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn saved_state_round_trips(
            failed: bool, may_exit: bool, is_format: bool, at in 0usize..31,
            kinds in prop::collection::vec((0u8..3, any::<u8>()), 1..31),
        ) {
            let passes: Vec<Pass> = kinds
                .iter()
                .map(|&(kind, byte)| match kind {
                    0 => Pass::Write(vec![byte; 512]),
                    1 => Pass::WriteZeroes,
                    _ => Pass::Discard,
                })
                .collect();
            let operation = if is_format { Operation::Format } else { Operation::Sanitize };
            let saved = SavedOperation { operation, failed, may_exit, pass: at.min(passes.len()), passes };
            prop_assert_eq!(SavedOperation::decode(&saved.encode(), 512), Some(saved.clone()));
            // Truncated bytes decode to a failure, or to fewer passes.
            let bytes = saved.encode();
            let cut = &bytes[..bytes.len() - 1];
            prop_assert_ne!(SavedOperation::decode(cut, 512), Some(saved));
        }

        #[test]
        fn arbitrary_bytes_decode_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            prop_assert_eq!(SavedOperation::decode(&bytes, 512).is_none(), bytes.is_empty());
        }
    }
}
