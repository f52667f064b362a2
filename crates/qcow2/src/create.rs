//! Creates images: header, refcount table and blocks, and an empty L1 table.

use crate::backing::extension;
use crate::header::{
    BACKING_NAME_MAX, DATA_FILE, EXTENDED_CLUSTER_BITS_MIN, EXTENDED_L2, EXTENSION_BACKING_FORMAT,
    EXTENSION_DATA_FILE, EXTENSION_IDENTITY, RAW_DATA_FILE,
};
use crate::refcounts::set;
use crate::{Error, Result, Storage, io};

const VERSION: u32 = 3;
/// 16-bit reference counts, QEMU's default.
const REFCOUNT_ORDER: u32 = 4;
const REFCOUNT_ORDER_MAX: u32 = 6;
const HEADER_BYTES: u32 = 104;

/// Parameters of a new image.
#[derive(Clone, Debug)]
pub struct CreateOptions {
    /// Size of the disk in bytes, a multiple of 512.
    pub size: u64,
    /// log2 of the cluster size in bytes, 9 to 21.
    pub cluster_bits: u32,
    /// log2 of the width of a reference count in bits, 0 to 6.
    pub refcount_order: u32,
    /// Extended L2 entries: 32 subclusters per cluster. The cluster size must be at least 16 KiB.
    pub extended_l2: bool,
    /// Name and format of the backing image.
    pub backing: Option<(String, String)>,
    /// External data file.
    pub data_file: Option<DataFileOptions>,
    /// Random number that distinguishes the image from one that replaces it.
    pub identity: Option<u128>,
}

/// External data file of a new image.
#[derive(Clone, Debug)]
pub struct DataFileOptions {
    /// Name as stored in the header.
    pub name: String,
    /// The data file is also a valid raw disk. It must contain only zeroes.
    pub is_raw: bool,
}

impl CreateOptions {
    /// Returns options for an image with 64 KiB clusters and no backing image.
    pub fn new(size: u64) -> CreateOptions {
        CreateOptions {
            size,
            cluster_bits: 16,
            refcount_order: REFCOUNT_ORDER,
            extended_l2: false,
            backing: None,
            data_file: None,
            identity: None,
        }
    }
}

/// Creates an image in an empty storage.
///
/// # Errors
/// The storage failed, or the options are invalid.
pub fn create(storage: &impl Storage, options: &CreateOptions) -> Result<()> {
    let CreateOptions {
        size,
        cluster_bits,
        refcount_order,
        extended_l2,
        ..
    } = *options;
    if !(9..=21).contains(&cluster_bits)
        || refcount_order > REFCOUNT_ORDER_MAX
        || !size.is_multiple_of(512)
        || size > i64::MAX as u64
    {
        return Err(Error::Unsupported(format!(
            "invalid size {size} bytes or cluster size 2^{cluster_bits} bytes: the size must be a multiple of 512, the cluster size 2^9 to 2^21"
        )));
    }
    if options.backing.is_some() && options.data_file.as_ref().is_some_and(|data| data.is_raw) {
        return Err(Error::Unsupported(
            "an image with data_file_raw cannot have a backing image".to_owned(),
        ));
    }
    if extended_l2 && cluster_bits < EXTENDED_CLUSTER_BITS_MIN {
        return Err(Error::Unsupported(format!(
            "extended L2 entries need clusters of at least 16 KiB, found 2^{cluster_bits} bytes"
        )));
    }
    let cluster = 1_u64 << cluster_bits;
    let l1_entries = size.div_ceil(cluster << (cluster_bits - 3 - u32::from(extended_l2)));
    if l1_entries > (32 << 20) / 8 {
        return Err(Error::Unsupported(format!(
            "size {size} bytes is too large for clusters of {cluster} bytes; hint: use larger clusters"
        )));
    }
    let l1_clusters = (l1_entries.max(1) * 8).div_ceil(cluster);
    let per_block = (cluster * 8) >> refcount_order;
    // header, table, blocks, L1 table
    let (mut blocks, mut table_clusters) = (1, 1);
    let used = loop {
        let used = 1 + table_clusters + blocks + l1_clusters;
        let (needed, needed_table) = (used.div_ceil(per_block), (blocks * 8).div_ceil(cluster));
        if needed <= blocks && needed_table <= table_clusters {
            break used;
        }
        (blocks, table_clusters) = (needed.max(blocks), needed_table.max(table_clusters));
    };
    let head = header(options, l1_entries as u32, table_clusters, blocks)?;
    let first_block = 1 + table_clusters;
    let table: Vec<u8> = (0..blocks)
        .flat_map(|n| ((first_block + n) << cluster_bits).to_be_bytes())
        .collect();
    let zeroed = storage.zero(0, used << cluster_bits);
    zeroed
        .and_then(|()| storage.write_at(1 << cluster_bits, &table))
        .map_err(io("cannot write the refcount table"))?;
    for number in 0..blocks {
        let mut block = vec![0; cluster as usize];
        for at in 0..used.saturating_sub(number * per_block).min(per_block) {
            set(&mut block, refcount_order, at, 1);
        }
        storage
            .write_at((first_block + number) << cluster_bits, &block)
            .map_err(io("cannot write a refcount block"))?;
    }
    storage
        .sync()
        .and_then(|()| storage.write_at(0, &head))
        .and_then(|()| storage.sync())
        .map_err(io("cannot write the header"))
}

fn header(
    options: &CreateOptions,
    l1_entries: u32,
    table_clusters: u64,
    blocks: u64,
) -> Result<Vec<u8>> {
    let bits = options.cluster_bits;
    let l1_offset = (1 + table_clusters + blocks) << bits;
    let mut head = b"QFI\xfb".to_vec();
    head.extend(VERSION.to_be_bytes());
    // The offset and length of the backing file name are filled in below.
    head.extend([0; 12]);
    head.extend(bits.to_be_bytes());
    head.extend(options.size.to_be_bytes());
    head.extend(0_u32.to_be_bytes());
    head.extend(l1_entries.to_be_bytes());
    head.extend(l1_offset.to_be_bytes());
    head.extend((1_u64 << bits).to_be_bytes());
    head.extend((table_clusters as u32).to_be_bytes());
    // no snapshots; features
    head.extend([0; 4 + 8]);
    let mut incompatible = if options.extended_l2 { EXTENDED_L2 } else { 0 };
    let mut autoclear = 0_u64;
    if let Some(data_file) = &options.data_file {
        incompatible |= DATA_FILE;
        autoclear |= if data_file.is_raw { RAW_DATA_FILE } else { 0 };
    }
    head.extend(incompatible.to_be_bytes());
    head.extend([0; 8]);
    head.extend(autoclear.to_be_bytes());
    head.extend(options.refcount_order.to_be_bytes());
    head.extend(HEADER_BYTES.to_be_bytes());
    if let Some(data_file) = &options.data_file {
        extension(&mut head, EXTENSION_DATA_FILE, data_file.name.as_bytes());
    }
    if let Some(identity) = options.identity {
        extension(&mut head, EXTENSION_IDENTITY, &identity.to_be_bytes());
    }
    if let Some((name, format)) = &options.backing {
        extension(&mut head, EXTENSION_BACKING_FORMAT, format.as_bytes());
        head.extend([0; 8]);
        let at = head.len() as u64;
        head[8..16].copy_from_slice(&at.to_be_bytes());
        head[16..20].copy_from_slice(&(name.len() as u32).to_be_bytes());
        head.extend(name.as_bytes());
        if name.len() > BACKING_NAME_MAX {
            return no_room(&head);
        }
    } else {
        head.extend([0; 8]);
    }
    match head.len() as u64 > 1 << bits {
        true => no_room(&head),
        false => Ok(head),
    }
}

fn no_room(head: &[u8]) -> Result<Vec<u8>> {
    Err(Error::Unsupported(format!(
        "the names of other files make the header {} bytes long, more than a cluster; hint: use relative paths or larger clusters",
        head.len()
    )))
}
