//! C interfaces of librados and librbd, loaded when the first disk needs them.
//!
//! The program also runs without Ceph installed. Signatures are those of `rados/librados.h` and `rbd/librbd.h`; the versions
//! 2 and 1 of the shared objects guarantee them. Functions that are missing in Ceph 14 are optional.

use std::error::Error as _;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Mutex;

use crate::Error;

pub(crate) type Cluster = *mut c_void;
pub(crate) type IoCtx = *mut c_void;
pub(crate) type Image = *mut c_void;
pub(crate) type Completion = *mut c_void;
pub(crate) type CompletionCallback = unsafe extern "C" fn(Completion, *mut c_void);
pub(crate) type UpdateCallback = unsafe extern "C" fn(*mut c_void);
pub(crate) type WriteOp = *mut c_void;
pub(crate) type NotifiedCallback =
    unsafe extern "C" fn(*mut c_void, u64, u64, u64, *mut c_void, usize);
pub(crate) type WatchErrorCallback = unsafe extern "C" fn(*mut c_void, u64, c_int);
pub(crate) type DiffCallback = unsafe extern "C" fn(u64, usize, c_int, *mut c_void) -> c_int;
pub(crate) type Progress = unsafe extern "C" fn(u64, u64, *mut c_void) -> c_int;

/// `rbd_image_info_t`.
#[repr(C)]
pub(crate) struct ImageInfo {
    pub size: u64,
    pub object_size: u64,
    pub objects: u64,
    pub order: c_int,
    block_name_prefix: [c_char; 24],
    parent_pool: i64,
    parent_name: [c_char; 96],
}

impl ImageInfo {
    pub(crate) const EMPTY: ImageInfo = ImageInfo {
        size: 0,
        object_size: 0,
        objects: 0,
        order: 0,
        block_name_prefix: [0; 24],
        parent_pool: 0,
        parent_name: [0; 96],
    };
}

/// `rbd_image_spec_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ImageSpec {
    pub id: *mut c_char,
    pub name: *mut c_char,
}

/// `rbd_config_option_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ConfigOption {
    pub name: *mut c_char,
    pub value: *mut c_char,
    pub source: c_int,
}

/// `RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`.
pub(crate) const THICK: c_int = 1;

macro_rules! functions {
    (
        required { $($from:ident: fn $name:ident($($argument:ty),*) $(-> $result:ty)?;)* }
        optional { $($late_from:ident: fn $late:ident($($late_argument:ty),*) -> $late_result:ty;)* }
    ) => {
        /// The functions in use of both libraries.
        pub(crate) struct Library {
            $(pub $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            $(pub $late: Option<unsafe extern "C" fn($($late_argument),*) -> $late_result>,)*
        }

        impl Library {
            fn of(rados: &libloading::Library, rbd: &libloading::Library) -> Result<Library, libloading::Error> {
                let from = |library: &str| if library == "rados" { rados } else { rbd };
                Ok(Library {
                    $($name: {
                        let name = concat!(stringify!($name), "\0");
                        // SAFETY: the header declares the function with exactly this signature, and the libraries stay
                        // loaded until the process ends: `load` forgets them.
                        *unsafe { from(stringify!($from)).get(name.as_bytes()) }?
                    },)*
                    $($late: {
                        let name = concat!(stringify!($late), "\0");
                        // SAFETY: as above.
                        unsafe { from(stringify!($late_from)).get(name.as_bytes()) }.ok().map(|found| *found)
                    },)*
                })
            }
        }
    };
}

functions! {
    required {
        rados: fn rados_create2(*mut Cluster, *const c_char, *const c_char, u64) -> c_int;
        rados: fn rados_conf_read_file(Cluster, *const c_char) -> c_int;
        rados: fn rados_conf_set(Cluster, *const c_char, *const c_char) -> c_int;
        rados: fn rados_conf_get(Cluster, *const c_char, *mut c_char, usize) -> c_int;
        rados: fn rados_connect(Cluster) -> c_int;
        rados: fn rados_shutdown(Cluster);
        rados: fn rados_cluster_fsid(Cluster, *mut c_char, usize) -> c_int;
        rados: fn rados_ioctx_create(Cluster, *const c_char, *mut IoCtx) -> c_int;
        rados: fn rados_ioctx_destroy(IoCtx);
        rados: fn rados_ioctx_get_id(IoCtx) -> i64;
        rados: fn rados_ioctx_set_namespace(IoCtx, *const c_char);
        rados: fn rados_create_write_op() -> WriteOp;
        rados: fn rados_release_write_op(WriteOp);
        rados: fn rados_write_op_create(WriteOp, c_int, *const c_char);
        rados: fn rados_write_op_cmpext(WriteOp, *const c_char, usize, u64, *mut c_int);
        rados: fn rados_write_op_write_full(WriteOp, *const c_char, usize);
        rados: fn rados_write_op_operate(WriteOp, IoCtx, *const c_char, *mut libc::c_long, c_int) -> c_int;
        rados: fn rados_read(IoCtx, *const c_char, *mut c_char, usize, u64) -> c_int;
        rados: fn rados_watch3(IoCtx, *const c_char, *mut u64, NotifiedCallback, WatchErrorCallback, u32, *mut c_void) -> c_int;
        rados: fn rados_watch_check(IoCtx, u64) -> c_int;
        rados: fn rados_unwatch2(IoCtx, u64) -> c_int;
        rados: fn rados_watch_flush(Cluster) -> c_int;
        rados: fn rados_notify2(IoCtx, *const c_char, *const c_char, c_int, u64, *mut *mut c_char, *mut usize) -> c_int;
        rados: fn rados_notify_ack(IoCtx, *const c_char, u64, u64, *const c_char, c_int) -> c_int;
        rados: fn rados_wait_for_latest_osdmap(Cluster) -> c_int;
        rados: fn rados_buffer_free(*mut c_char);
        rbd: fn rbd_version(*mut c_int, *mut c_int, *mut c_int);
        rbd: fn rbd_list2(IoCtx, *mut ImageSpec, *mut usize) -> c_int;
        rbd: fn rbd_image_spec_list_cleanup(*mut ImageSpec, usize);
        rbd: fn rbd_open(IoCtx, *const c_char, *mut Image, *const c_char) -> c_int;
        rbd: fn rbd_open_read_only(IoCtx, *const c_char, *mut Image, *const c_char) -> c_int;
        rbd: fn rbd_open_by_id_read_only(IoCtx, *const c_char, *mut Image, *const c_char) -> c_int;
        rbd: fn rbd_close(Image) -> c_int;
        rbd: fn rbd_stat(Image, *mut ImageInfo, usize) -> c_int;
        rbd: fn rbd_get_size(Image, *mut u64) -> c_int;
        rbd: fn rbd_get_features(Image, *mut u64) -> c_int;
        rbd: fn rbd_get_flags(Image, *mut u64) -> c_int;
        rbd: fn rbd_get_stripe_unit(Image, *mut u64) -> c_int;
        rbd: fn rbd_get_id(Image, *mut c_char, usize) -> c_int;
        rbd: fn rbd_get_name(Image, *mut c_char, *mut usize) -> c_int;
        rbd: fn rbd_snap_get_id(Image, *const c_char, *mut u64) -> c_int;
        rbd: fn rbd_resize2(Image, u64, bool, Progress, *mut c_void) -> c_int;
        rbd: fn rbd_update_watch(Image, *mut u64, UpdateCallback, *mut c_void) -> c_int;
        rbd: fn rbd_update_unwatch(Image, u64) -> c_int;
        rbd: fn rbd_diff_iterate2(Image, *const c_char, u64, u64, u8, u8, DiffCallback, *mut c_void) -> c_int;
        rbd: fn rbd_is_exclusive_lock_owner(Image, *mut c_int) -> c_int;
        rbd: fn rbd_lock_acquire(Image, c_int) -> c_int;
        rbd: fn rbd_lock_release(Image) -> c_int;
        rbd: fn rbd_lock_get_owners(Image, *mut c_int, *mut *mut c_char, *mut usize) -> c_int;
        rbd: fn rbd_lock_get_owners_cleanup(*mut *mut c_char, usize);
        rbd: fn rbd_metadata_get(Image, *const c_char, *mut c_char, *mut usize) -> c_int;
        rbd: fn rbd_metadata_set(Image, *const c_char, *const c_char) -> c_int;
        rbd: fn rbd_metadata_remove(Image, *const c_char) -> c_int;
        rbd: fn rbd_config_image_list(Image, *mut ConfigOption, *mut c_int) -> c_int;
        rbd: fn rbd_config_image_list_cleanup(*mut ConfigOption, c_int);
        rbd: fn rbd_aio_create_completion(*mut c_void, CompletionCallback, *mut Completion) -> c_int;
        rbd: fn rbd_aio_get_return_value(Completion) -> isize;
        rbd: fn rbd_aio_release(Completion);
        rbd: fn rbd_aio_readv(Image, *const libc::iovec, c_int, u64, Completion) -> c_int;
        rbd: fn rbd_aio_writev(Image, *const libc::iovec, c_int, u64, Completion) -> c_int;
        rbd: fn rbd_aio_flush(Image, Completion) -> c_int;
        rbd: fn rbd_aio_discard(Image, u64, u64, Completion) -> c_int;
        rbd: fn rbd_aio_compare_and_write(Image, u64, usize, *const c_char, *const c_char, Completion, *mut u64, c_int) -> isize;
    }
    optional {
        rados: fn rados_getaddrs(Cluster, *mut *mut c_char) -> c_int;
        rados: fn rados_blocklist_add(Cluster, *mut c_char, u32) -> c_int;
        rados: fn rados_blacklist_add(Cluster, *mut c_char, u32) -> c_int;
        rbd: fn rbd_aio_write_zeroes(Image, u64, usize, Completion, c_int, c_int) -> c_int;
    }
}

/// Package name in Debian and Ubuntu; librados is a dependency.
const PACKAGE: &str = "librbd1";

/// Returns the libraries, loaded once. A failure is not cached, so installing the package requires no restart.
pub(crate) fn library() -> Result<&'static Library, Error> {
    static LOADED: Mutex<Option<&'static Library>> = Mutex::new(None);
    let mut loaded = LOADED
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(library) = *loaded {
        return Ok(library);
    }
    let library = load("librados.so.2", "librbd.so.1")?;
    let library: &'static Library = Box::leak(Box::new(library));
    let (mut major, mut minor, mut patch) = (0, 0, 0);
    // SAFETY: three integers that outlive the call.
    unsafe { (library.rbd_version)(&mut major, &mut minor, &mut patch) };
    tracing::debug!("librbd loaded, version={major}.{minor}.{patch}");
    *loaded = Some(library);
    Ok(library)
}

fn load(rados: &str, rbd: &str) -> Result<Library, Error> {
    let missing = |error: libloading::Error| Error::Library {
        package: PACKAGE,
        // The error's own text omits the loader's message.
        reason: error
            .source()
            .map_or(error.to_string(), ToString::to_string),
    };
    // SAFETY: initialisers of Ceph's libraries run here, on a thread of the control plane; they are made to be loaded by any
    // program.
    let rados = unsafe { libloading::Library::new(rados) }.map_err(missing)?;
    // SAFETY: as above.
    let rbd = unsafe { libloading::Library::new(rbd) }.map_err(missing)?;
    let library = Library::of(&rados, &rbd).map_err(missing)?;
    // Threads of the libraries run until the process ends.
    std::mem::forget((rados, rbd));
    Ok(library)
}

/// Text up to the NUL in a buffer.
pub(crate) fn text_in(bytes: &[u8]) -> String {
    CStr::from_bytes_until_nul(bytes)
        .map(|text| text.to_string_lossy().into_owned())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_names_the_package() {
        let error = load("librados.so.999", "librbd.so.999").err().unwrap();
        let text = error.to_string();
        assert!(
            text.contains("librados.so.999") && text.contains("apt-get install librbd1"),
            "{text}"
        );
    }

    #[test]
    fn structures_have_the_sizes_of_the_headers() {
        assert_eq!(size_of::<ImageInfo>(), 160);
        assert_eq!(size_of::<ImageSpec>(), 16);
        assert_eq!(size_of::<ConfigOption>(), 24);
        assert_eq!(size_of::<guest_memory::Segment>(), size_of::<libc::iovec>());
    }
}
