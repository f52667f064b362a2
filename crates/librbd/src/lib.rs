//! Ceph's librados and librbd through their C interfaces, loaded at run time: clusters, images, and I/O on images.
//!
//! ```text
//!   ClusterConfig -> Cluster (shared by all disks of one cluster and user)
//!                      Image::open -> Arc<Image>             may block: the control plane calls it, with a timeout
//!                                         Channel::new       one per worker: submit never blocks, allocates nothing
//!   librbd's own thread -- completion callback --> the channel's queue, an eventfd if it was empty --> Channel::reap
//! ```
//!
//! An [`Object`] of an image's pool is shared by clients: replaced atomically after a comparison, watched, and the target of
//! notifications.
//!
//! A channel owns the buffer of an I/O until its completion is reaped. If a channel is dropped with I/O in flight, the buffers are
//! leaked, never freed. Tests: in the modules here, and `tests/tests/rbd.rs` against a real cluster.

mod channel;
mod cluster;
mod connections;
mod deadline;
mod error;
mod image;
mod object;
mod raw;

pub use channel::{Channel, Finished, SEGMENTS_MAX, Waker};
pub use cluster::{Cluster, ClusterConfig, Pool};
pub use connections::wait_until_closed;
pub use error::Error;
pub use image::{Image, ImageName, ImageShape, LockMode, Piece};
pub use object::{Notification, Object, Watch};
