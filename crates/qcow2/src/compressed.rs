//! Decompression of clusters. The output never exceeds one cluster.

use std::io::Read;

use crate::entry::L2Entry;
use crate::{Compression, Image, Result, Storage, corrupt, io};

impl<S: Storage> Image<S> {
    /// Reads the compressed cluster at an offset; `content` has the size of a cluster.
    ///
    /// # Errors
    /// The storage failed, or the compressed data is invalid.
    pub fn read_compressed(&self, offset: u64, content: &mut [u8]) -> Result<()> {
        let L2Entry::Compressed { host, bytes } = self.entry(offset) else {
            return corrupt(format!("offset {offset} is not compressed"));
        };
        let mut packed = vec![0; bytes as usize];
        self.storage
            .read_at(host, &mut packed)
            .map_err(io("cannot read compressed data"))?;
        let unpacked = match self.header.compression {
            Compression::Zlib => inflate(&packed, content),
            Compression::Zstd => unpack_zstd(&packed, content),
        };
        unpacked.ok_or_else(|| {
            crate::Error::Corrupt(format!(
                "the compressed data at offset {offset} are damaged"
            ))
        })
    }
}

/// Decompresses raw deflate data; bytes after its end are padding.
fn inflate(packed: &[u8], content: &mut [u8]) -> Option<()> {
    let pieces = std::iter::once(packed);
    let got = miniz_oxide::inflate::decompress_slice_iter_to_slice(content, pieces, false, true);
    (got.ok()? == content.len()).then_some(())
}

fn unpack_zstd(packed: &[u8], content: &mut [u8]) -> Option<()> {
    let mut decoder = ruzstd::decoding::StreamingDecoder::new(packed).ok()?;
    decoder.read_exact(content).ok()
}
