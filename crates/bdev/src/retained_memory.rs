//! Memory of RAM disks that outlives the daemon: one memfd per disk, in the service manager's descriptor store (systemd) under the disk's
//! name.
//!
//! ```text
//!   0            2 MiB
//!   | header     | the disk's bytes
//! ```
//!
//! Header: magic number, version, block size, size, and a random number that determines the identity. A killed daemon leaves every byte
//! that it has copied: the disk matches the answers to clients.

use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use guest_memory::Mapping;

/// Storage for memory beyond the end of this process.
pub trait DescriptorStore: Send + Sync {
    /// Returns the memory stored for a disk of this name.
    fn take(&self, disk: &str) -> Option<OwnedFd>;

    /// Stores memory; false if it is not stored.
    fn keep(&self, disk: &str, memory: BorrowedFd<'_>) -> bool;

    /// Removes the memory of this disk from the store.
    fn forget(&self, disk: &str);
}

static STORE: OnceLock<Box<dyn DescriptorStore>> = OnceLock::new();

/// Sets the store of this process, once and before disks are opened.
pub fn set_descriptor_store(store: Box<dyn DescriptorStore>) {
    // The first one stays.
    STORE.set(store).ok();
}

pub(crate) fn descriptor_store() -> Option<&'static dyn DescriptorStore> {
    STORE.get().map(|store| &**store)
}

const MAGIC: [u8; 16] = *b"lunette ram disk";
const VERSION: u32 = 1;
/// Offset of the disk's bytes: a multiple of a huge page.
pub(crate) const DATA_AT: u64 = 2 << 20;
const PAGE: u64 = 4096;
const HEADER: usize = 48;

/// The memory of one disk.
#[derive(Debug)]
pub(crate) struct RetainedMemory {
    pub file: File,
    pub block_size: u32,
    /// Size of the disk in bytes.
    pub size: u64,
    /// Random number that determines the disk's identity.
    pub id: [u8; 16],
}

impl RetainedMemory {
    /// Creates memory of zeroes.
    pub fn create(
        disk: &str,
        size: u64,
        block_size: u32,
        id: [u8; 16],
    ) -> io::Result<RetainedMemory> {
        let length = DATA_AT + size.next_multiple_of(PAGE);
        let retained = RetainedMemory {
            file: Mapping::create_sealed_memfd(&format!("lunette-{disk}"), length)?,
            block_size,
            size,
            id,
        };
        retained.write()?;
        Ok(retained)
    }

    /// Opens the memory of a previous daemon.
    pub fn open(memory: OwnedFd) -> io::Result<RetainedMemory> {
        let file = File::from(memory);
        let refused = |reason: &str| io::Error::new(io::ErrorKind::InvalidData, reason);
        let mut bytes = [0; HEADER];
        file.read_exact_at(&mut bytes, 0)?;
        let number = |at: usize| {
            u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        if bytes[..16] != MAGIC {
            return Err(refused("the retained memory is not that of a RAM disk"));
        }
        if number(16) != VERSION {
            return Err(refused(
                "the retained memory belongs to another version of Lunette",
            ));
        }
        let mut size = [0; 8];
        size.copy_from_slice(&bytes[24..32]);
        let mut id = [0; 16];
        id.copy_from_slice(&bytes[32..48]);
        let retained = RetainedMemory {
            block_size: number(20),
            size: u64::from_ne_bytes(size),
            id,
            file,
        };
        let needed = retained
            .size
            .checked_next_multiple_of(PAGE)
            .and_then(|size| size.checked_add(DATA_AT));
        match needed {
            Some(needed) if retained.size > 0 && needed <= retained.file.metadata()?.len() => {
                Ok(retained)
            }
            _ => Err(refused("the retained memory is shorter than its disk")),
        }
    }

    /// Returns true if the disk can end here without data loss. This includes growth interrupted by a kill: it was not used.
    pub fn may_end_at(&self, size: u64) -> bool {
        !Mapping::has_data_from(&self.file, DATA_AT + size.next_multiple_of(PAGE))
    }

    /// Extends the memory for a larger size, and records the size in it.
    pub fn resize(&mut self, size: u64) -> io::Result<()> {
        let length = DATA_AT + size.next_multiple_of(PAGE);
        if length > self.file.metadata()?.len() {
            self.file.set_len(length)?;
        }
        self.size = size;
        self.write()
    }

    fn write(&self) -> io::Result<()> {
        let mut bytes = [0; HEADER];
        bytes[..16].copy_from_slice(&MAGIC);
        bytes[16..20].copy_from_slice(&VERSION.to_ne_bytes());
        bytes[20..24].copy_from_slice(&self.block_size.to_ne_bytes());
        bytes[24..32].copy_from_slice(&self.size.to_ne_bytes());
        bytes[32..].copy_from_slice(&self.id);
        self.file.write_all_at(&bytes, 0)
    }

    pub fn key(&self) -> String {
        let digits = self.id.iter().map(|byte| format!("{byte:02x}"));
        format!("ram:{}", digits.collect::<String>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_reopened_with_its_shape_and_size() {
        let mut retained = RetainedMemory::create("d0", 1 << 20, 4096, [7; 16]).unwrap();
        retained.resize(3 << 20).unwrap();
        let again = RetainedMemory::open(retained.file.try_clone().unwrap().into()).unwrap();
        assert_eq!(
            (again.size, again.block_size, again.id),
            (3 << 20, 4096, [7; 16])
        );
        assert_eq!(again.key(), format!("ram:{}", "07".repeat(16)));
    }

    #[test]
    fn memory_of_others_is_refused() {
        let other = Mapping::create_sealed_memfd("other", 4 << 20).unwrap();
        let error = RetainedMemory::open(other.try_clone().unwrap().into()).unwrap_err();
        assert!(
            error.to_string().contains("not that of a RAM disk"),
            "{error}"
        );
        let retained = RetainedMemory::create("d0", 1 << 20, 512, [0; 16]).unwrap();
        // A wrong size, and an unknown version.
        retained
            .file
            .write_all_at(&(u64::MAX - 100).to_ne_bytes(), 24)
            .unwrap();
        assert!(RetainedMemory::open(retained.file.try_clone().unwrap().into()).is_err());
        retained.file.write_all_at(&9u32.to_ne_bytes(), 16).unwrap();
        let error = RetainedMemory::open(retained.file.try_clone().unwrap().into()).unwrap_err();
        assert!(error.to_string().contains("another version"), "{error}");
        let short = Mapping::create_sealed_memfd("short", 8).unwrap();
        assert!(RetainedMemory::open(short.into()).is_err());
    }

    /// Stores for one process, as systemd does for successive processes.
    #[derive(Default)]
    struct Store(std::sync::Mutex<std::collections::HashMap<String, OwnedFd>>);

    impl DescriptorStore for &'static Store {
        fn take(&self, disk: &str) -> Option<OwnedFd> {
            self.0.lock().unwrap().get(disk)?.try_clone().ok()
        }

        fn keep(&self, disk: &str, memory: BorrowedFd<'_>) -> bool {
            let own = memory.try_clone_to_owned().unwrap();
            self.0.lock().unwrap().entry(disk.to_owned()).or_insert(own);
            true
        }

        fn forget(&self, disk: &str) {
            self.0.lock().unwrap().remove(disk);
        }
    }

    #[test]
    fn recreated_disk_has_its_content_and_needs_the_same_shape() {
        use crate::{BlockDevice, OpenError, Ram, RamOptions, Removable};

        set_descriptor_store(Box::new(
            Box::leak(Box::<Store>::default()) as &'static Store
        ));
        let options = RamOptions {
            size: 4 << 20,
            ..RamOptions::default()
        };
        let open = |options: RamOptions| Ram::keep(options, "d0");
        let first = open(options).unwrap();
        assert_eq!(first.info().atomic_writes, None);
        let identity = |disk: &Ram| disk.capabilities().medium.unwrap().own_identity();
        assert_eq!(crate::capabilities::names(&first), "medium removable");
        let again = open(options).unwrap();
        assert_eq!(identity(&first), identity(&again));
        // Data that a smaller disk would lose.
        let memory = descriptor_store().unwrap().take("d0").unwrap();
        File::from(memory)
            .write_all_at(b"lunette", DATA_AT + (3 << 20))
            .unwrap();
        for other in [
            RamOptions {
                size: 2 << 20,
                ..options
            },
            RamOptions {
                block_size: 4096,
                ..options
            },
        ] {
            assert!(matches!(
                open(other),
                Err(OpenError::RetainedMemory {
                    size: 0x40_0000,
                    block_size: 512
                })
            ));
        }
        // The disk grows. An unused part does not prevent the old size.
        let grown = open(RamOptions {
            size: 8 << 20,
            ..options
        })
        .unwrap();
        assert_eq!(
            (grown.capacity().bytes(), identity(&grown)),
            (8 << 20, identity(&first))
        );
        assert_eq!(open(options).unwrap().capacity().bytes(), 4 << 20);
        assert!(grown.forget(), "the retained memory has no users");
        assert_ne!(identity(&open(options).unwrap()), identity(&first));
    }
}
