//! Changes the backing image in the header. All other header fields are preserved.

use crate::header::{
    BACKING_NAME_MAX, EXTENSION_BACKING_FORMAT, EXTENSION_END, VERSION_2_BYTES, be32, be64,
};
use crate::{Error, Header, Image, Result, Storage, corrupt, io};

/// Offsets of the header fields for the offset and length of the backing file name.
const NAME_OFFSET_AT: usize = 8;
const NAME_LENGTH_AT: usize = 16;
/// Offset of the header length field (version 3).
const HEADER_LENGTH_AT: usize = 100;

impl<S: Storage> Image<S> {
    /// Sets the name and format of the backing image, or removes it. Unallocated clusters then read as the new backing image.
    ///
    /// # Errors
    /// The storage failed, or the header has no room for the name. Nothing has changed then.
    pub fn set_backing(&mut self, backing: Option<(&str, &str)>) -> Result<()> {
        if self.header.is_data_file_raw() && backing.is_some() {
            return Err(Error::Unsupported(
                "an image with data_file_raw cannot have a backing image".to_owned(),
            ));
        }
        let mut head = vec![0; self.header.cluster_bytes() as usize];
        let read = self.storage.read_at(0, &mut head);
        read.map_err(io("cannot read the header"))?;
        let head = with_backing(&head, backing)?;
        // Data copied from the old backing image must be durable before the image refers to the new one.
        let written = self.sync_data().and_then(|()| self.storage.sync());
        let written = written.and_then(|()| self.storage.write_at(0, &head));
        written
            .and_then(|()| self.storage.sync())
            .map_err(io("cannot write the header"))?;
        self.header = Header::read(&self.storage)?;
        Ok(())
    }
}

/// Returns the header cluster with another backing image.
fn with_backing(head: &[u8], backing: Option<(&str, &str)>) -> Result<Vec<u8>> {
    let fixed = match be32(head, 4) {
        2 => VERSION_2_BYTES as usize,
        _ => be32(head, HEADER_LENGTH_AT) as usize,
    };
    let Some(fixed_part) = head.get(..fixed) else {
        return corrupt("the header is longer than a cluster");
    };
    let mut new = fixed_part.to_vec();
    if let Some((_, format)) = backing {
        extension(&mut new, EXTENSION_BACKING_FORMAT, format.as_bytes());
    }
    for (kind, bytes) in other_extensions(head, fixed)? {
        extension(&mut new, kind, bytes);
    }
    new.extend([0; 8]);
    let (at, name) = match backing {
        Some((name, _)) => (new.len() as u64, name.as_bytes()),
        None => (0, [].as_slice()),
    };
    new[NAME_OFFSET_AT..NAME_OFFSET_AT + 8].copy_from_slice(&at.to_be_bytes());
    let length = name.len() as u32;
    new[NAME_LENGTH_AT..NAME_LENGTH_AT + 4].copy_from_slice(&length.to_be_bytes());
    new.extend(name);
    if name.len() > BACKING_NAME_MAX || new.len() > head.len() {
        return Err(Error::Unsupported(format!(
            "the backing image's name of {} bytes does not fit into the header; hint: use a shorter, relative path",
            name.len()
        )));
    }
    new.resize(head.len(), 0);
    Ok(new)
}

pub(crate) fn extension(head: &mut Vec<u8>, kind: u32, bytes: &[u8]) {
    head.extend(kind.to_be_bytes());
    head.extend((bytes.len() as u32).to_be_bytes());
    head.extend(bytes);
    head.resize(head.len().next_multiple_of(8), 0);
}

/// Returns all extensions except the backing file format.
fn other_extensions(head: &[u8], from: usize) -> Result<Vec<(u32, &[u8])>> {
    let end = match be64(head, NAME_OFFSET_AT) {
        0 => head.len(),
        name => usize::try_from(name).unwrap_or(usize::MAX).min(head.len()),
    };
    let mut found = Vec::new();
    let mut at = from;
    while at + 8 <= end {
        let (kind, length) = (be32(head, at), be32(head, at + 4) as usize);
        if kind == EXTENSION_END {
            break;
        }
        let Some(bytes) = head.get(at + 8..at + 8 + length) else {
            return corrupt("a header extension is longer than the header");
        };
        if kind != EXTENSION_BACKING_FORMAT {
            found.push((kind, bytes));
        }
        at += 8 + length.next_multiple_of(8);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A version 3 header with two extensions; the first is a backing file format.
    fn head() -> Vec<u8> {
        let mut head = b"QFI\xfb\0\0\0\x03".to_vec();
        head.resize(104, 0);
        head[100..104].copy_from_slice(&104_u32.to_be_bytes());
        head.extend(*b"\xe2\x79\x2a\xca\0\0\0\x03raw\0\0\0\0\0");
        head.extend(*b"\x12\x34\x56\x78\0\0\0\x04abcd\0\0\0\0");
        head.extend([0; 8]);
        let at = head.len() as u64;
        head.extend(*b"old.raw");
        head[8..16].copy_from_slice(&at.to_be_bytes());
        head[16..20].copy_from_slice(&7_u32.to_be_bytes());
        head.resize(512, 0);
        head
    }

    #[test]
    fn another_backing_image_keeps_the_other_extensions() {
        let new = with_backing(&head(), Some(("base.qcow2", "qcow2"))).unwrap();
        assert_eq!(new.len(), 512);
        assert_eq!(new[104..120], *b"\xe2\x79\x2a\xca\0\0\0\x05qcow2\0\0\0");
        assert_eq!(new[120..136], *b"\x12\x34\x56\x78\0\0\0\x04abcd\0\0\0\0");
        assert_eq!(new[136..144], [0; 8]);
        assert_eq!(be64(&new, 8), 144);
        assert_eq!(be32(&new, 16), 10);
        assert_eq!(new[144..154], *b"base.qcow2");
    }

    #[test]
    fn no_backing_image_leaves_no_name_and_no_format() {
        let new = with_backing(&head(), None).unwrap();
        assert_eq!((be64(&new, 8), be32(&new, 16)), (0, 0));
        assert_eq!(new[104..120], *b"\x12\x34\x56\x78\0\0\0\x04abcd\0\0\0\0");
        assert!(new[120..].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn a_name_without_room_is_refused() {
        let name = "x".repeat(400);
        assert!(with_backing(&head(), Some((&name, "raw"))).is_err());
    }

    #[test]
    fn damaged_extensions_are_refused() {
        let mut head = head();
        head[108..112].copy_from_slice(&u32::MAX.to_be_bytes());
        assert!(with_backing(&head, None).is_err());
        head[100..104].copy_from_slice(&4096_u32.to_be_bytes());
        assert!(with_backing(&head, None).is_err());
    }
}
