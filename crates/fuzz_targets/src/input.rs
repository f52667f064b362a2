//! Reads values from the front of an input. After its end an input reads as zeroes.

pub(crate) struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns at most `count` bytes.
    pub fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }

    pub fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let bytes = self.bytes(N);
        array[..bytes.len()].copy_from_slice(bytes);
        array
    }

    pub fn byte(&mut self) -> u8 {
        let [byte] = self.array();
        byte
    }

    pub fn be16(&mut self) -> u16 {
        u16::from_be_bytes(self.array())
    }

    pub fn be32(&mut self) -> u32 {
        u32::from_be_bytes(self.array())
    }

    pub fn be64(&mut self) -> u64 {
        u64::from_be_bytes(self.array())
    }
}
