//! Disk images of other formats by how they begin: such a file is served byte by byte, as all others, and whoever gave it may
//! not mean that.

use std::fmt;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags};

/// What the recognition reads from the start of a file.
const HEAD_BYTES: usize = 68;
/// Where the signature of VDI lies.
const VDI_SIGNATURE_OFFSET: usize = 64;

/// A format of disk images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageFormat {
    /// QEMU's copy-on-write format, all versions.
    Qcow2,
    /// VMware's: an extent, or the text that describes extents.
    Vmdk,
    /// Hyper-V's.
    Vhdx,
    /// VirtualBox's.
    Vdi,
    /// Encrypted, with the keys in its header.
    Luks,
}

impl ImageFormat {
    /// The format of a file that begins with these bytes; `None`: raw, as far as can be seen.
    pub fn of(head: &[u8]) -> Option<ImageFormat> {
        let vdi = head.get(VDI_SIGNATURE_OFFSET..HEAD_BYTES);
        if head.starts_with(b"QFI\xfb") {
            Some(ImageFormat::Qcow2)
        } else if head.starts_with(b"KDMV") || head.starts_with(b"# Disk DescriptorFile") {
            Some(ImageFormat::Vmdk)
        } else if head.starts_with(b"vhdxfile") {
            Some(ImageFormat::Vhdx)
        } else if head.starts_with(b"LUKS\xba\xbe") {
            Some(ImageFormat::Luks)
        } else if vdi == Some(b"\x7f\x10\xda\xbe") {
            Some(ImageFormat::Vdi)
        } else {
            None
        }
    }

    /// The format of a file or block device, where it can be read: this is for warnings, not for errors.
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

    /// The format of an open file, which is not open for direct I/O.
    pub(super) fn of_file(fd: impl AsFd) -> Option<ImageFormat> {
        let mut head = [0; HEAD_BYTES];
        let read = rustix::io::pread(fd, &mut head, 0).ok()?;
        ImageFormat::of(head.get(..read)?)
    }

    /// What a user of a disk in such a file needs to know.
    pub fn warning(self) -> String {
        let hint = match self {
            ImageFormat::Qcow2 => "; hint: image:PATH serves the disk in it",
            ImageFormat::Vmdk | ImageFormat::Vhdx | ImageFormat::Vdi => {
                "; hint: qemu-img convert -O qcow2 makes an image that image:PATH serves"
            }
            ImageFormat::Luks => "",
        };
        format!(
            "its content begins as a disk image in the format {self}: it is served as raw bytes, the image's header included{hint}"
        )
    }
}

impl fmt::Display for ImageFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ImageFormat::Qcow2 => "qcow2",
            ImageFormat::Vmdk => "VMDK",
            ImageFormat::Vhdx => "VHDX",
            ImageFormat::Vdi => "VDI",
            ImageFormat::Luks => "LUKS",
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
    fn each_format_is_known_by_its_magic_bytes() {
        let vdi = vdi();
        let known: [(&[u8], ImageFormat); 6] = [
            (&[0x51, 0x46, 0x49, 0xfb, 0, 0, 0, 3], ImageFormat::Qcow2),
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
    fn what_only_resembles_a_format_is_raw() {
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
