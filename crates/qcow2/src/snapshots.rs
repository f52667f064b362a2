//! Internal snapshots: parser of the snapshot table. Snapshots share clusters with the disk, which copies them before it writes.

use crate::{Header, Result, Storage, corrupt, io};

/// Size of the fixed part of an entry.
pub(crate) const ENTRY_BYTES: usize = 40;
/// Limit for the L1 entries of all snapshots together: enough for 8,000 snapshots of a 16 TiB disk with 64 KiB clusters.
pub(crate) const L1_ENTRIES_MAX: u64 = 1 << 28;
/// Limit for the size of the table, as in QEMU.
const TABLE_BYTES_MAX: u64 = 64 << 20;

/// An internal snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Unique ID, usually a number.
    pub id: String,
    /// Name of the snapshot.
    pub name: String,
    /// Time of creation: seconds since 1970.
    pub seconds: u32,
    /// Nanoseconds part of the time of creation.
    pub nanoseconds: u32,
    /// Running time of the virtual machine, in nanoseconds.
    pub clock_nanoseconds: u64,
    /// Instructions executed by the virtual machine, if they were counted.
    pub instructions: Option<u64>,
    /// Size of the saved virtual machine state, in bytes.
    pub state_bytes: u64,
    /// Size of the disk, in bytes.
    pub size: Option<u64>,
    pub(crate) l1_offset: u64,
    pub(crate) l1_entries: u32,
}

/// Reads the snapshots from the table.
pub(crate) fn read(storage: &impl Storage, header: &Header) -> Result<Vec<Snapshot>> {
    Ok(read_table(storage, header)?.0)
}

/// Returns the raw entries, each with its padding. [`read_table`] has validated them.
pub(crate) fn raw_entries(storage: &impl Storage, header: &Header) -> Result<Vec<Vec<u8>>> {
    let (_, bytes) = read_table(storage, header)?;
    let mut table = vec![0; bytes as usize];
    let read = storage.read_at(header.snapshots_offset, &mut table);
    read.map_err(io("cannot read the snapshot table"))?;
    let mut rest = table.as_slice();
    let mut entries = Vec::new();
    for _ in 0..header.snapshots {
        let Some(fixed) = rest.get(..ENTRY_BYTES) else {
            return corrupt("the snapshot table has changed");
        };
        let short = |at: usize| usize::from(u16::from_be_bytes([fixed[at], fixed[at + 1]]));
        let extra = u32::from_be_bytes([fixed[36], fixed[37], fixed[38], fixed[39]]) as usize;
        let length = (ENTRY_BYTES + extra + short(12) + short(14)).next_multiple_of(8);
        let Some((entry, others)) = rest.split_at_checked(length) else {
            return corrupt("the snapshot table has changed");
        };
        entries.push(entry.to_vec());
        rest = others;
    }
    Ok(entries)
}

pub(crate) fn read_table(storage: &impl Storage, header: &Header) -> Result<(Vec<Snapshot>, u64)> {
    let mut at = header.snapshots_offset;
    let mut snapshots = Vec::new();
    let size = storage
        .size()
        .map_err(io("cannot read the size of the file"))?;
    let mut all_l1_entries = 0;
    let read = |at: u64, length: usize| {
        let mut bytes = vec![0; length];
        storage
            .read_at(at, &mut bytes)
            .map_err(io("cannot read the snapshot table"))?;
        Ok(bytes)
    };
    for _ in 0..header.snapshots {
        let fixed = read(at, ENTRY_BYTES)?;
        let number = |at: usize, bytes: usize| {
            let field = &fixed[at..at + bytes];
            field
                .iter()
                .fold(0, |number: u64, byte| number << 8 | u64::from(*byte))
        };
        let (id_bytes, name_bytes) = (number(12, 2) as usize, number(14, 2) as usize);
        let extra_bytes = number(36, 4) as usize;
        if extra_bytes > 1024 {
            return corrupt("an entry of the snapshot table is too long");
        }
        let l1_entries = number(8, 4) as u32;
        let l1_offset = number(0, 8);
        all_l1_entries += u64::from(l1_entries);
        let end = l1_offset.checked_add(u64::from(l1_entries) * 8);
        let is_within = end.is_some_and(|end| end <= size);
        if l1_entries > (32 << 20) / 8
            || !l1_offset.is_multiple_of(header.cluster_bytes())
            || !is_within
            || all_l1_entries > L1_ENTRIES_MAX
        {
            return corrupt("a snapshot's L1 table has an invalid location");
        }
        let rest = read(at + ENTRY_BYTES as u64, extra_bytes + id_bytes + name_bytes)?;
        let (extra, names) = rest.split_at(extra_bytes);
        let (id, name) = names.split_at(id_bytes);
        let extra = |at: usize| {
            let field = extra.get(at..at + 8)?;
            Some(
                field
                    .iter()
                    .fold(0, |number: u64, byte| number << 8 | u64::from(*byte)),
            )
        };
        snapshots.push(Snapshot {
            id: String::from_utf8_lossy(id).into_owned(),
            name: String::from_utf8_lossy(name).into_owned(),
            seconds: number(16, 4) as u32,
            nanoseconds: number(20, 4) as u32,
            clock_nanoseconds: number(24, 8),
            instructions: extra(16).filter(|count| *count != u64::MAX),
            state_bytes: extra(0).unwrap_or(number(32, 4)),
            size: extra(8),
            l1_offset,
            l1_entries,
        });
        let length = (ENTRY_BYTES + rest.len()) as u64;
        at += length.next_multiple_of(8);
        if at - header.snapshots_offset > TABLE_BYTES_MAX {
            return corrupt("the snapshot table is too long");
        }
    }
    Ok((snapshots, at - header.snapshots_offset))
}
