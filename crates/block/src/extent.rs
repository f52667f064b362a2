//! What stands behind a part of a disk.

/// Whether bytes have space behind them, and whether anything was written there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocation {
    /// No space: reads as zeroes, and a write must find some first.
    Hole,
    /// Space that nothing was written into: reads as zeroes, and a write finds its space.
    Reserved,
    /// Space that may hold something other than zeroes.
    Data,
}

/// Bytes of one allocation, from an offset that was asked for to an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// What they have behind them.
    pub allocation: Allocation,
    /// The first byte after them, beyond the offset. More of the same may follow.
    pub end: u64,
}

impl Extent {
    /// What is true of every disk: there may be data everywhere.
    pub const UNKNOWN: Extent = Extent::data(u64::MAX);

    /// No space up to `end`.
    pub const fn hole(end: u64) -> Extent {
        Extent {
            allocation: Allocation::Hole,
            end,
        }
    }

    /// Space without data up to `end`.
    pub const fn reserved(end: u64) -> Extent {
        Extent {
            allocation: Allocation::Reserved,
            end,
        }
    }

    /// Perhaps data up to `end`.
    pub const fn data(end: u64) -> Extent {
        Extent {
            allocation: Allocation::Data,
            end,
        }
    }
}
