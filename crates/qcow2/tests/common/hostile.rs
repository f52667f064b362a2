//! Uses an image of arbitrary bytes in every way: no panics, and no more memory than the size of the image.

use qcow2::{Header, Image, Mapping, OpenOptions, Repair};

use super::{Bytes, Recorded, write};

/// Opens, reads, writes, zeroes, resizes and checks an image of arbitrary bytes.
pub fn use_in_every_way(bytes: Vec<u8>) {
    let storage = Recorded::of(bytes.clone());
    // The metadata of such an image may require a file of any length.
    *storage.limit.borrow_mut() = Some(16 << 20);
    Image::check(&storage, Repair::Nothing).ok();
    let data = Recorded::default();
    *data.limit.borrow_mut() = Some(16 << 20);
    let has_data_file = Header::read(&&storage).is_ok_and(|header| header.has_data_file());
    let data = has_data_file.then_some(&data);
    let options = OpenOptions::READ_WRITE;
    if let Ok(mut image) = Image::open_with(&storage, data, options) {
        let size = image.map().size();
        let cluster = image.map().cluster_bytes();
        for offset in [0, cluster, size / 2, size.saturating_sub(512)] {
            let offset = offset / 512 * 512;
            if offset >= size {
                continue;
            }
            image.load(offset).ok();
            let segment = image.map().segment(offset, 512);
            assert!(segment.length <= 512);
            if segment.mapping == Mapping::Compressed {
                image
                    .read_compressed(offset, &mut vec![0; cluster as usize])
                    .ok();
            }
            write(
                &mut image,
                &mut Some(Bytes(vec![1; 4096])),
                offset,
                &[7; 512],
            )
            .ok();
            let whole = offset / cluster * cluster;
            image
                .zero_clusters(whole, cluster.min(size - whole), 4096)
                .ok();
        }
        image.resize(size.saturating_add(1 << 20), None).ok();
        image.resize(512, None).ok();
        image.release().ok();
        image.close().ok();
    }
    let storage = Recorded::of(bytes);
    *storage.limit.borrow_mut() = Some(16 << 20);
    Image::check(&storage, Repair::All).ok();
}
