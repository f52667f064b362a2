//! Address space is finite, and sparse files may have any length. The only test of its program, because it uses most of the address space.

mod support;

use std::os::fd::AsFd;

use guest_memory::Mapping;
use reactor::PollLimit;
use support::{Rig, connect, eventually};
use vhost_frontend::request;

/// Sends regions of these sizes in one empty file. Returns the front end if the daemon accepts all of them.
fn share(rig: &Rig, sizes: &[u64]) -> Option<vhost_frontend::FrontEnd> {
    eventually("the last one has left", || !rig.is_connected("bad"));
    let front_end = connect(&rig.socket("bad"));
    let file = rustix::fs::memfd_create("large", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 1 << 46).unwrap();
    let mut address = 1 << 40;
    for &size in sizes {
        let words = [0, address, size, address, 0];
        let payload = words.map(u64::to_ne_bytes).concat();
        let add = request::ADD_MEM_REG;
        front_end
            .acknowledged(add, &payload, &[file.as_fd()])
            .ok()?;
        address += size;
    }
    Some(front_end)
}

#[test]
fn front_end_with_all_memory_leaves_addresses_for_others() {
    let rig = Rig::polling(1, PollLimit::Never);
    let (_, good) = (rig.serve_ram("bad", 1), rig.serve_ram("good", 1));
    let mut sizes = Vec::new();
    for bits in (33..=46).rev() {
        while sizes.len() < 400 {
            sizes.push(1 << bits);
            if share(&rig, &sizes).is_none() {
                sizes.pop();
                break;
            }
        }
    }
    let bad = share(&rig, &sizes).expect("as before");
    let total: u64 = sizes.iter().sum();
    let room = Mapping::anonymous(1 << 40);
    drop(bad);
    assert!(room.is_ok(), "nothing is left beside {} GiB", total >> 30);
    assert!(total >= 1 << 43, "{} GiB are no large guest", total >> 30);
    connect(&good);
}
