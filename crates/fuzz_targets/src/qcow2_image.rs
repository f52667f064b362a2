//! Uses an image with changed metadata. Rules: no panic, and no more memory than the size of the image.
//!
//! The first byte selects the options of the image. Each of the following groups of ten bytes is an offset and eight bytes to write
//! there. The image is used as in the test `hostile` of `qcow2`.

use crate::images::{Recorded, hostile};
use crate::input::Input;

/// Performs all operations on the image that `data` describes.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let kind = input.byte();
    let storage = Recorded::default();
    let extended_l2 = kind >= 192;
    let options = qcow2::CreateOptions {
        cluster_bits: if extended_l2 {
            14
        } else {
            9 + u32::from(kind % 3)
        },
        extended_l2,
        refcount_order: u32::from(kind / 3 % 7),
        ..qcow2::CreateOptions::new(64 << 10)
    };
    qcow2::create(&&storage, &options).expect("a new image");
    let mut bytes = storage.bytes();
    for _ in 0..64 {
        if input.is_empty() {
            break;
        }
        let at = usize::from(input.be16());
        let field: [u8; 8] = input.array();
        if let Some(place) = bytes.get_mut(at..at + 8) {
            place.copy_from_slice(&field);
        }
    }
    hostile::use_in_every_way(bytes);
}
