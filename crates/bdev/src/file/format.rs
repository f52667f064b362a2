//! Disk image formats, recognised by signatures. A guest may write a signature to a raw disk: it is a reason to warn or to refuse, never to
//! open a file as an image.

use std::fmt;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags};

/// Bytes searched at the start and at the end of a file.
const HEAD_BYTES: usize = 512;
const TAIL_BYTES: usize = 512;
/// Offset of the VDI signature.
const VDI_SIGNATURE_OFFSET: usize = 64;
/// First lines of a cloop image, also a shell script.
const CLOOP: &[u8] = b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop ";

/// A format of disk images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageFormat {
    /// QEMU's copy-on-write format, versions 2 and 3.
    Qcow2,
    /// QEMU's copy-on-write format, version 1.
    Qcow,
    /// QEMU's enhanced disk format.
    Qed,
    /// VMware: an extent, or the text that describes extents.
    Vmdk,
    /// Virtual PC, with a block table or with a footer only.
    Vhd,
    /// Hyper-V.
    Vhdx,
    /// VirtualBox.
    Vdi,
    /// Expanding images of Parallels.
    Parallels,
    /// Encrypted volume with the keys in its header.
    Luks,
    /// Apple disk image.
    Dmg,
    /// Redolog images of Bochs.
    Bochs,
    /// Compressed loop images of Linux.
    Cloop,
}

impl ImageFormat {
    /// Returns the format of a file that begins with these bytes, if known.
    pub fn of(head: &[u8]) -> Option<ImageFormat> {
        let vdi = head.get(VDI_SIGNATURE_OFFSET..VDI_SIGNATURE_OFFSET + 4);
        let signatures: [(&[u8], ImageFormat); 13] = [
            (b"QFI\xfb\0\0\0\x01", ImageFormat::Qcow),
            (b"QFI\xfb", ImageFormat::Qcow2),
            (b"QED\0", ImageFormat::Qed),
            (b"KDMV", ImageFormat::Vmdk),
            (b"COWD", ImageFormat::Vmdk),
            (b"# Disk DescriptorFile", ImageFormat::Vmdk),
            (b"conectix", ImageFormat::Vhd),
            (b"vhdxfile", ImageFormat::Vhdx),
            (b"WithoutFreeSpace", ImageFormat::Parallels),
            (b"WithouFreSpacExt", ImageFormat::Parallels),
            (b"LUKS\xba\xbe", ImageFormat::Luks),
            (b"Bochs Virtual HD Image", ImageFormat::Bochs),
            (CLOOP, ImageFormat::Cloop),
        ];
        let found = signatures
            .into_iter()
            .find(|(signature, _)| head.starts_with(signature));
        let is_vdi = vdi == Some(b"\x7f\x10\xda\xbe");
        found
            .map(|(_, format)| format)
            .or(is_vdi.then_some(ImageFormat::Vdi))
    }

    /// Returns the format of a file with this last block of 512 bytes.
    fn of_tail(tail: &[u8]) -> Option<ImageFormat> {
        if tail.starts_with(b"conectix") {
            return Some(ImageFormat::Vhd);
        }
        tail.starts_with(b"koly").then_some(ImageFormat::Dmg)
    }

    /// Returns the format of a file or block device; `None` also if unreadable.
    pub fn of_path(path: &Path) -> Option<ImageFormat> {
        // NONBLOCK: a FIFO must not hang.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let fd = rustix::fs::open(path, flags, Mode::empty()).ok()?;
        let stat = rustix::fs::fstat(&fd).ok()?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile | FileType::BlockDevice => ImageFormat::of_file(fd),
            _ => None,
        }
    }

    /// Returns the format of an open file without direct I/O.
    pub(super) fn of_file(fd: impl AsFd) -> Option<ImageFormat> {
        let mut head = [0; HEAD_BYTES];
        let read = rustix::io::pread(&fd, &mut head, 0).ok()?;
        ImageFormat::of(head.get(..read)?).or_else(|| {
            let end = rustix::fs::fstat(&fd).ok()?.st_size;
            let at = u64::try_from(end).ok()?.checked_sub(TAIL_BYTES as u64)?;
            let mut tail = [0; TAIL_BYTES];
            let read = rustix::io::pread(&fd, &mut tail, at).ok()?;
            ImageFormat::of_tail(tail.get(..read)?)
        })
    }

    /// Returns the warning for serving such a file as raw bytes.
    pub fn warning(self) -> String {
        let hint = match self {
            ImageFormat::Qcow2 => "; hint: image:PATH serves the disk in it",
            ImageFormat::Luks => "",
            _ => "; hint: qemu-img convert -O qcow2 makes an image that image:PATH serves",
        };
        format!(
            "the file contains a disk image in the format {self}: it is served as raw bytes, with the image's header{hint}"
        )
    }
}

impl fmt::Display for ImageFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ImageFormat::Qcow2 => "qcow2",
            ImageFormat::Qcow => "qcow (version 1)",
            ImageFormat::Qed => "QED",
            ImageFormat::Vmdk => "VMDK",
            ImageFormat::Vhd => "VHD",
            ImageFormat::Vhdx => "VHDX",
            ImageFormat::Vdi => "VDI",
            ImageFormat::Parallels => "Parallels",
            ImageFormat::Luks => "LUKS",
            ImageFormat::Dmg => "DMG",
            ImageFormat::Bochs => "Bochs",
            ImageFormat::Cloop => "cloop",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vdi() -> Vec<u8> {
        let mut head = b"<<< Oracle VM VirtualBox Disk Image >>>\n".to_vec();
        head.resize(64, 0);
        head.extend([0x7f, 0x10, 0xda, 0xbe]);
        head
    }

    #[test]
    fn each_format_is_detected_by_its_magic_bytes() {
        let vdi = vdi();
        let known: [(&[u8], ImageFormat); 15] = [
            (&[0x51, 0x46, 0x49, 0xfb, 0, 0, 0, 3], ImageFormat::Qcow2),
            (&[0x51, 0x46, 0x49, 0xfb, 0, 0, 0, 2], ImageFormat::Qcow2),
            (&[0x51, 0x46, 0x49, 0xfb, 0, 0, 0, 1], ImageFormat::Qcow),
            (&[0x51, 0x45, 0x44, 0x00, 0, 0, 1, 0], ImageFormat::Qed),
            (b"conectix\0\0\0\x02\0\x01\0\0", ImageFormat::Vhd),
            (b"WithoutFreeSpace\x02\0\0\0", ImageFormat::Parallels),
            (b"WithouFreSpacExt\x02\0\0\0", ImageFormat::Parallels),
            (b"Bochs Virtual HD Image\0\0", ImageFormat::Bochs),
            (
                b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop file=$0",
                ImageFormat::Cloop,
            ),
            (b"COWD\x01\0\0\0", ImageFormat::Vmdk),
            (&[0x4b, 0x44, 0x4d, 0x56, 1, 0, 0, 0], ImageFormat::Vmdk),
            (b"# Disk DescriptorFile\nversion=1\n", ImageFormat::Vmdk),
            (b"vhdxfileQ\0E\0M\0U\0", ImageFormat::Vhdx),
            (
                &[0x4c, 0x55, 0x4b, 0x53, 0xba, 0xbe, 0, 2],
                ImageFormat::Luks,
            ),
            (&vdi, ImageFormat::Vdi),
        ];
        for (head, format) in known {
            assert_eq!(ImageFormat::of(head), Some(format));
        }
    }

    #[test]
    fn formats_with_a_footer_are_detected_by_the_last_block() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        for (footer, format) in [
            (b"conectix", Some(ImageFormat::Vhd)),
            (b"koly\0\0\0\x04", Some(ImageFormat::Dmg)),
            (b"EFI PART", None),
        ] {
            let mut disk = vec![0; 1 << 20];
            disk.extend(footer);
            disk.resize((1 << 20) + 512, 0);
            std::fs::write(&path, &disk).unwrap();
            assert_eq!(ImageFormat::of_path(&path), format);
        }
    }

    #[test]
    fn content_that_resembles_a_format_is_raw() {
        let vdi = vdi();
        let raw: [&[u8]; 7] = [
            b"",
            b"QFI",
            b"QFI\xfa",
            b"\0QFI\xfb",
            b"LUKS",
            // cut off in the signature
            &vdi[..67],
            &vdi[1..],
        ];
        for head in raw {
            assert_eq!(ImageFormat::of(head), None, "{head:?}");
        }
    }
}
