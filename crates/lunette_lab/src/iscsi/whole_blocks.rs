//! Converts pieces of any length to pieces of whole blocks. Holes of a file may begin and end within a block of a
//! unit.

use super::ends::Piece;

/// Buffers incomplete blocks.
pub struct WholeBlocks {
    block_size: usize,
    held: Vec<u8>,
}

impl WholeBlocks {
    /// Creates a buffer for blocks of `block_size` bytes.
    pub fn new(block_size: u32) -> WholeBlocks {
        WholeBlocks {
            block_size: block_size as usize,
            held: Vec::new(),
        }
    }

    /// Adds a piece and returns all whole blocks.
    pub fn push(&mut self, piece: Piece) -> Vec<Piece> {
        let mut whole = Vec::new();
        match piece {
            Piece::Data(data) => {
                let mut rest = &data[..];
                if !self.held.is_empty() {
                    let (first, behind) = rest.split_at(rest.len().min(self.missing()));
                    self.held.extend_from_slice(first);
                    rest = behind;
                    whole.extend(self.take_full());
                }
                let cut = rest.len() - rest.len() % self.block_size;
                let (blocks, left) = rest.split_at(cut);
                if !blocks.is_empty() {
                    whole.push(Piece::Data(blocks.to_vec()));
                }
                self.held.extend_from_slice(left);
            }
            Piece::Hole(mut bytes) => {
                if !self.held.is_empty() {
                    let first = bytes.min(self.missing() as u64) as usize;
                    self.held.resize(self.held.len() + first, 0);
                    bytes -= first as u64;
                    whole.extend(self.take_full());
                }
                let left = bytes % self.block_size as u64;
                if bytes > left {
                    whole.push(Piece::Hole(bytes - left));
                }
                self.held.resize(self.held.len() + left as usize, 0);
            }
        }
        whole
    }

    /// Returns the last block, padded with zeroes.
    pub fn end(&mut self) -> Option<Piece> {
        if self.held.is_empty() {
            return None;
        }
        self.held.resize(self.block_size, 0);
        self.take_full()
    }

    fn missing(&self) -> usize {
        self.block_size - self.held.len()
    }

    fn take_full(&mut self) -> Option<Piece> {
        (self.held.len() == self.block_size).then(|| Piece::Data(std::mem::take(&mut self.held)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_out_is_what_went_in_in_whole_blocks() {
        // Lengths that begin and end within blocks; alternating data and holes.
        let lengths = [3u64, 9, 16, 1, 40, 7, 24, 5, 8, 2];
        for shift in 0..lengths.len() {
            let mut blocks = WholeBlocks::new(8);
            let (mut went_in, mut came_out) = (Vec::new(), Vec::new());
            let take = |pieces: Vec<Piece>, out: &mut Vec<u8>| {
                for piece in pieces {
                    assert_eq!(piece.len() % 8, 0);
                    match piece {
                        Piece::Data(data) => out.extend(data),
                        Piece::Hole(bytes) => out.resize(out.len() + bytes as usize, 0),
                    }
                }
            };
            for (at, length) in lengths.iter().cycle().skip(shift).take(20).enumerate() {
                let piece = if at % 2 == 0 {
                    let data: Vec<u8> = (0..*length).map(|n| (n + at as u64) as u8 | 1).collect();
                    went_in.extend_from_slice(&data);
                    Piece::Data(data)
                } else {
                    went_in.resize(went_in.len() + *length as usize, 0);
                    Piece::Hole(*length)
                };
                take(blocks.push(piece), &mut came_out);
            }
            take(blocks.end().into_iter().collect(), &mut came_out);
            went_in.resize(went_in.len().next_multiple_of(8), 0);
            assert_eq!(came_out, went_in, "{shift}");
        }
    }
}
