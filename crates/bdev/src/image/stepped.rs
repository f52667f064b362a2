//! Image owners in a simulation: objects stepped by its only thread.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use qcow2::CreateOptions;

use crate::BlockDevice;
use crate::layer::visit_stack;

use super::owner::{Owner, Request};

struct Stepped {
    owner: Owner,
    requests: Receiver<Request>,
}

thread_local! {
    static OWNERS: RefCell<Vec<Stepped>> = const { RefCell::new(Vec::new()) };
    static SHAPE: RefCell<Option<CreateOptions>> = const { RefCell::new(None) };
}

pub(super) fn add(owner: Owner, requests: Receiver<Request>) {
    OWNERS.with_borrow_mut(|owners| owners.push(Stepped { owner, requests }));
}

/// Sets the shape of new images; default clusters are larger than simulated disks.
pub fn shape_new_images(shape: CreateOptions) {
    SHAPE.set(Some(shape));
}

pub(super) fn shape_of_new_images() -> Option<CreateOptions> {
    SHAPE.with_borrow(Clone::clone)
}

/// Returns the number of images that have an owner.
pub fn image_owners() -> usize {
    OWNERS.with_borrow(Vec::len)
}

/// Serves the queued requests of each owner. Owners without senders close their images.
pub fn step_image_owners() {
    step_some(|_| true);
}

/// Steps the owners of `device` and its backing devices, within the step of an owner that reads it. Steps of other owners may depend on the
/// step in progress.
pub(crate) fn step_owners_of(device: &dyn BlockDevice) {
    let mut capacities = Vec::new();
    visit_stack(device, |device| {
        capacities.push(Arc::clone(device.capacity()));
    });
    step_some(|owner| {
        let mut capacities = capacities.iter();
        capacities.any(|capacity| Arc::ptr_eq(capacity, &owner.shared.capacity))
    });
}

fn step_some(is_meant: impl Fn(&Owner) -> bool) {
    for _ in 0..image_owners() {
        let next = OWNERS.with_borrow_mut(|owners| (!owners.is_empty()).then(|| owners.remove(0)));
        let Some(mut one) = next else { return };
        if !is_meant(&one.owner) || one.owner.step(&one.requests) {
            OWNERS.with_borrow_mut(|owners| owners.push(one));
        }
    }
}

/// Simulates a kill: drops all owners without closing images.
pub fn kill_image_owners() {
    OWNERS.take();
}
