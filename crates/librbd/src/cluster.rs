//! A connection to a cluster as one user, shared by all disks with the same cluster, user and options.
//!
//! Owned by the images that were opened through it, and closed with the last of them. Control plane only: every call may block and
//! has a timeout.

use std::collections::HashMap;
use std::ffi::{CString, c_char};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

pub use block::ClusterConfig;

use crate::connections::Connection;
use crate::deadline::within;
use crate::error::check;
use crate::raw::{self, Library, library, text_in};
use crate::{Error, ImageName};

/// Options that differ from Ceph's defaults. [`ClusterConfig::options`] overrides them.
const DEFAULTS: [(&str, &str); 6] = [
    // Timeout of the monitors in seconds; Ceph's default of 300 is too long.
    ("client_mount_timeout", "10"),
    // Without a cache, completed writes are durable and visible to other hosts.
    ("rbd_cache", "false"),
    // Discards are exact. By default librbd reports success for a discard below 64 KiB but keeps the data.
    ("rbd_skip_partial_discard", "false"),
    ("rbd_discard_granularity_bytes", "4096"),
    // Disables the budget of requests in flight. Waiting for it would block a worker and all of its disks; clients' queues are
    // bounded already.
    ("objecter_inflight_ops", "0"),
    ("objecter_inflight_op_bytes", "0"),
];

/// Extra time to connect beyond `client_mount_timeout`, which limits only the wait for monitors.
const CONNECT_GRACE: Duration = Duration::from_secs(5);

/// Timeout of calls to a connected cluster.
pub(crate) const CALL_LIMIT: Duration = Duration::from_secs(10);
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(3);

/// A connection to a cluster.
pub struct Cluster {
    library: &'static Library,
    handle: raw::Cluster,
    fsid: String,
    user: String,
    /// Held until the shutdown has ended.
    connection: Option<Connection>,
}

// SAFETY: librados locks the shared state of a handle; all its functions may be called on any thread.
unsafe impl Send for Cluster {}
// SAFETY: as above.
unsafe impl Sync for Cluster {}

/// Shared connections.
static SHARED: Mutex<Option<HashMap<ClusterConfig, Weak<Cluster>>>> = Mutex::new(None);

fn shared() -> MutexGuard<'static, Option<HashMap<ClusterConfig, Weak<Cluster>>>> {
    SHARED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A pool, or a namespace of a pool.
pub struct Pool {
    cluster: Arc<Cluster>,
    handle: raw::IoCtx,
    name: String,
}

// SAFETY: as for `Cluster`; the context does not change after its creation.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Cluster {
    /// Returns the shared connection with these settings, or a new one. Blocks for at most `client_mount_timeout` and 5 s.
    ///
    /// # Errors
    /// Libraries missing, monitors unreachable, user or key refused.
    pub fn connect(config: &ClusterConfig) -> Result<Arc<Cluster>, Error> {
        let there = |map: &HashMap<ClusterConfig, Weak<Cluster>>| map.get(config)?.upgrade();
        if let Some(cluster) = shared().as_ref().and_then(there) {
            return Ok(cluster);
        }
        let wanted = config.clone();
        let limit = config
            .options
            .get("client_mount_timeout")
            .map_or(DEFAULTS[0].1, String::as_str)
            .parse()
            .ok()
            .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
            .filter(|limit| !limit.is_zero())
            .unwrap_or(Duration::from_secs(10));
        let operation = format!("connect to the cluster as {}", config.user());
        let made = within(limit.saturating_add(CONNECT_GRACE), &operation, move || {
            Cluster::make(&wanted).map(Arc::new)
        });
        let made = made.map_err(|error| match error {
            Error::TimedOut { operation, seconds } => {
                let operation =
                    format!("{operation} (no response from the monitors within {seconds} s)");
                Error::failed(operation, libc::ETIMEDOUT, MONITORS_HINT)
            }
            other => other,
        })?;
        let mut map = shared();
        let map = map.get_or_insert_default();
        map.retain(|_, cluster| cluster.strong_count() > 0);
        // Another thread may have connected meanwhile; use its connection.
        if let Some(cluster) = there(map) {
            return Ok(cluster);
        }
        map.insert(config.clone(), Arc::downgrade(&made));
        Ok(made)
    }

    /// Removes the connection from the shared ones, so that later calls of [`Cluster::connect`] do not return it.
    pub fn retire(self: &Arc<Cluster>) {
        let this = Arc::downgrade(self);
        if let Some(map) = &mut *shared() {
            map.retain(|_, cluster| !cluster.ptr_eq(&this));
        }
    }

    fn make(config: &ClusterConfig) -> Result<Cluster, Error> {
        let library = library()?;
        let user = config.user();
        let name = c_text("user", &user)?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: texts end with NUL and outlive the call, as does `handle`.
        let made =
            unsafe { (library.rados_create2)(&mut handle, c"ceph".as_ptr(), name.as_ptr(), 0) };
        check(made, |errno| {
            Error::failed(format!("make a client named {user}"), errno, "")
        })?;
        // From here on, `Drop` shuts down the handle if this function fails.
        let mut cluster = Cluster {
            library,
            handle,
            fsid: String::new(),
            user,
            connection: Some(Connection::new()),
        };
        cluster.configure(config)?;
        // SAFETY: `handle` was made above and is not connected yet.
        let connected = unsafe { (library.rados_connect)(handle) };
        check(connected, |errno| {
            let operation = format!("connect to the cluster as {}", cluster.user);
            Error::failed(operation, errno, connect_hint(errno, &cluster.user))
        })?;
        let mut fsid = [0_u8; 64];
        // SAFETY: a connected handle, and a buffer with its length.
        let result =
            unsafe { (library.rados_cluster_fsid)(handle, fsid.as_mut_ptr().cast(), fsid.len()) };
        check(result, |errno| {
            Error::failed("read the cluster's fsid", errno, "")
        })?;
        cluster.fsid = text_in(&fsid);
        tracing::info!(
            fsid = cluster.fsid,
            user = cluster.user,
            "Ceph cluster connected"
        );
        Ok(cluster)
    }

    fn configure(&self, config: &ClusterConfig) -> Result<(), Error> {
        let conf = match &config.conf {
            Some(path) => Some(c_text("path", &path.to_string_lossy())?),
            None => None,
        };
        if let Some(path) = &config.conf {
            // librados reports an unreadable file as a missing one.
            check_readable("Ceph's configuration", path, CONF_HINT)?;
        }
        let path = conf.as_ref().map_or(std::ptr::null(), |path| path.as_ptr());
        // SAFETY: a handle that is not connected; a text that ends with NUL, or null.
        let read = unsafe { (self.library.rados_conf_read_file)(self.handle, path) };
        // Without a file, options may provide monitors and key.
        if !(read == -libc::ENOENT && config.conf.is_none() && config.mon_host.is_some()) {
            check(read, |errno| {
                let path = config.conf.as_ref().map_or_else(
                    || "/etc/ceph/ceph.conf".to_owned(),
                    |path| path.display().to_string(),
                );
                Error::failed(
                    format!("read Ceph's configuration {path}"),
                    errno,
                    CONF_HINT,
                )
            })?;
        }
        for (key, value) in DEFAULTS {
            self.set(key, value)?;
        }
        if let Some(keyring) = &config.keyring {
            // librados ignores an unreadable keyring and is then refused, with a less specific error.
            check_readable("the keyring", keyring, "")?;
            self.set("keyring", &keyring.to_string_lossy())?;
        }
        if let Some(mon_host) = &config.mon_host {
            self.set("mon_host", mon_host)?;
        }
        for (key, value) in &config.options {
            self.set(key, value)?;
        }
        Ok(())
    }

    fn set(&self, key: &str, value: &str) -> Result<(), Error> {
        let (c_key, c_value) = (c_text("option", key)?, c_text("value", value)?);
        // SAFETY: a handle, and two texts that end with NUL.
        let set =
            unsafe { (self.library.rados_conf_set)(self.handle, c_key.as_ptr(), c_value.as_ptr()) };
        check(set, |errno| {
            let hint = match errno {
                libc::ENOENT => "list Ceph's options with `ceph config ls`".to_owned(),
                _ => format!("see `ceph config help {key}`"),
            };
            Error::failed(format!("set Ceph's option {key} to {value:?}"), errno, hint)
        })?;
        Ok(())
    }

    /// Value of one of Ceph's options.
    pub fn option(&self, key: &str) -> Option<String> {
        let key = CString::new(key).ok()?;
        let mut value = [0_u8; 1024];
        // SAFETY: a handle, a text that ends with NUL, and a buffer with its length.
        let result = unsafe {
            (self.library.rados_conf_get)(
                self.handle,
                key.as_ptr(),
                value.as_mut_ptr().cast(),
                value.len(),
            )
        };
        (result >= 0).then(|| text_in(&value))
    }

    /// Identifier of the cluster.
    pub fn fsid(&self) -> &str {
        &self.fsid
    }

    /// User name in Ceph's form, `client.ID`.
    pub fn user(&self) -> &str {
        &self.user
    }

    /// Address of this client, as used in blocklists.
    ///
    /// # Errors
    /// When librados is too old.
    pub fn address(&self) -> Result<String, Error> {
        let operation = "read this client's address";
        let Some(getaddrs) = self.library.rados_getaddrs else {
            return Err(Error::failed(operation, libc::ENOSYS, ""));
        };
        let mut text = std::ptr::null_mut();
        // SAFETY: a connected handle, and a valid pointer for the result.
        let result = unsafe { getaddrs(self.handle, &mut text) };
        check(result, |errno| Error::failed(operation, errno, ""))?;
        // SAFETY: librados allocated the text, which ends with NUL, by strdup: it is freed here, once.
        let address = unsafe {
            let address = owned_text(text);
            libc::free(text.cast());
            address
        };
        Ok(address)
    }

    /// Blocklists the client with this address for the cluster's `mon_osd_blocklist_default_expire`, one hour by default. Returns
    /// after this client has received the new OSD map: an OSD that serves a later request of this client refuses requests of the
    /// blocklisted one. May block.
    ///
    /// # Errors
    /// Ceph's error, for example insufficient permission, or a timeout.
    pub fn blocklist(self: &Arc<Cluster>, address: &str) -> Result<(), Error> {
        let operation = format!("blocklist {address}");
        let text = c_text("address", address)?;
        let cluster = Arc::clone(self);
        let failed = operation.clone();
        within(CALL_LIMIT, &operation, move || {
            let library = cluster.library;
            let add = library.rados_blocklist_add.or(library.rados_blacklist_add);
            let add = add.ok_or_else(|| Error::failed(failed.clone(), libc::ENOSYS, ""))?;
            // SAFETY: a connected handle; the text ends with NUL and outlives the call, which only reads it.
            let added = unsafe { add(cluster.handle, text.as_ptr().cast_mut(), 0) };
            check(added, |errno| {
                let hint = "the user needs `profile rbd` for mon";
                Error::failed(failed, errno, hint)
            })?;
            Ok(())
        })
    }

    /// Waits for the newest OSD map, which contains the blocklist. An OSD that serves a later request of this client has it too.
    ///
    /// # Errors
    /// Ceph's error, or a timeout.
    pub fn wait_for_map(self: &Arc<Cluster>) -> Result<(), Error> {
        let operation = "wait for the newest map of OSDs";
        let cluster = Arc::clone(self);
        within(CALL_LIMIT, operation, move || {
            // SAFETY: a connected handle.
            let waited = unsafe { (cluster.library.rados_wait_for_latest_osdmap)(cluster.handle) };
            check(waited, |errno| Error::failed(operation, errno, "")).map(drop)
        })
    }

    pub(crate) fn library(&self) -> &'static Library {
        self.library
    }

    pub(crate) fn handle(&self) -> raw::Cluster {
        self.handle
    }
}

const CONF_HINT: &str = "set conf= to the file, or mon_host= to the monitors";

const MONITORS_HINT: &str = "check that the monitors run, and that conf= or mon_host= names them";

/// Fails for a file that librados would pass over.
fn check_readable(file: &str, path: &Path, hint: &str) -> Result<(), Error> {
    let Err(error) = std::fs::File::open(path) else {
        return Ok(());
    };
    let operation = format!("read {file} {}", path.display());
    Err(match error.kind() {
        std::io::ErrorKind::PermissionDenied => Error::Denied {
            operation,
            reason: sandbox::unreadable(path, &error),
        },
        _ => Error::failed(operation, error.raw_os_error().unwrap_or(libc::EIO), hint),
    })
}

fn connect_hint(errno: i32, user: &str) -> String {
    match errno {
        libc::ETIMEDOUT => MONITORS_HINT.to_owned(),
        libc::EACCES | libc::EPERM => {
            format!(
                "the monitors reject the key, or the keyring has none for {user}: compare it with `ceph auth get {user}`"
            )
        }
        libc::ENOENT | libc::EINVAL | libc::ENOTSUP => {
            format!("no usable key for {user}: set keyring= to a keyring, or id= to another user")
        }
        _ => String::new(),
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let (library, handle) = (self.library, Handle(self.handle));
        let connection = self.connection.take();
        // The shutdown may wait for an unreachable cluster; after the limit it continues on its thread.
        let shut_down = within(SHUTDOWN_LIMIT, "shut down the connection", move || {
            let handle = handle;
            // SAFETY: the handle was created once, has no other owner, and all contexts made of it are gone.
            unsafe { (library.rados_shutdown)(handle.0) };
            drop(connection);
            Ok(())
        });
        if let Err(error) = shut_down {
            tracing::warn!("cannot close a connection to a Ceph cluster: {error}");
        }
    }
}

/// A handle to be moved to another thread.
pub(crate) struct Handle(pub *mut std::ffi::c_void);

// SAFETY: librados' and librbd's handles belong to no thread.
unsafe impl Send for Handle {}

impl Pool {
    /// Opens a pool of the cluster, or a namespace of the pool.
    ///
    /// # Errors
    /// When there is no such pool, or on a timeout.
    pub fn of(cluster: &Arc<Cluster>, pool: &str, namespace: Option<&str>) -> Result<Pool, Error> {
        let cluster = Arc::clone(cluster);
        let (pool, namespace) = (pool.to_owned(), namespace.map(str::to_owned));
        let operation = format!("open pool {pool}");
        within(CALL_LIMIT, &operation, move || {
            Pool::make(cluster, &pool, namespace.as_deref())
        })
    }

    pub(crate) fn make(
        cluster: Arc<Cluster>,
        pool: &str,
        namespace: Option<&str>,
    ) -> Result<Pool, Error> {
        let library = cluster.library;
        let c_pool = c_text("pool", pool)?;
        let c_namespace = c_text("namespace", namespace.unwrap_or_default())?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a connected handle; a text that ends with NUL and a valid pointer for the result, both outlive the call.
        let made =
            unsafe { (library.rados_ioctx_create)(cluster.handle, c_pool.as_ptr(), &mut handle) };
        check(made, |errno| {
            let hint = match errno {
                libc::ENOENT => "list the pools with `ceph osd pool ls`",
                _ => "",
            };
            Error::failed(format!("open pool {pool}"), errno, hint)
        })?;
        // SAFETY: the context was made above; the text ends with NUL.
        unsafe { (library.rados_ioctx_set_namespace)(handle, c_namespace.as_ptr()) };
        let name = match namespace {
            Some(namespace) => format!("{pool}/{namespace}"),
            None => pool.to_owned(),
        };
        Ok(Pool {
            cluster,
            handle,
            name,
        })
    }

    /// `POOL` or `POOL/NAMESPACE`.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn cluster(&self) -> &Arc<Cluster> {
        &self.cluster
    }

    pub(crate) fn handle(&self) -> raw::IoCtx {
        self.handle
    }

    /// Returns the sorted names of all images.
    ///
    /// # Errors
    /// Ceph's error, or a timeout.
    pub fn images(self: &Arc<Pool>) -> Result<Vec<String>, Error> {
        let pool = Arc::clone(self);
        let operation = format!("list images of {}", self.name);
        within(CALL_LIMIT, &operation, move || pool.list())
    }

    fn list(&self) -> Result<Vec<String>, Error> {
        let library = self.cluster.library;
        let empty = raw::ImageSpec {
            id: std::ptr::null_mut(),
            name: std::ptr::null_mut(),
        };
        let mut specs = vec![empty; 256];
        loop {
            let mut count = specs.len();
            // SAFETY: a context, and space for `count` entries.
            let listed =
                unsafe { (library.rbd_list2)(self.handle, specs.as_mut_ptr(), &mut count) };
            if listed == -libc::ERANGE {
                // `count` is the current number; the next call may find more.
                specs.resize(count.max(specs.len()) + 16, empty);
                continue;
            }
            check(listed, |errno| {
                Error::failed(format!("list images of {}", self.name), errno, "")
            })?;
            let filled = specs.get(..count).unwrap_or_default();
            // SAFETY: librbd has filled these entries with texts that end with NUL.
            let names = filled.iter().map(|spec| unsafe { owned_text(spec.name) });
            let mut names: Vec<String> = names.collect();
            // SAFETY: exactly the entries that librbd has filled, once.
            unsafe { (library.rbd_image_spec_list_cleanup)(specs.as_mut_ptr(), count) };
            names.sort();
            return Ok(names);
        }
    }
}

impl Pool {
    /// Returns the name of the image with this identifier. `None` if it does not exist, not even in the trash.
    ///
    /// # Errors
    /// Ceph's error, or a timeout.
    pub fn name_of(self: &Arc<Pool>, id: &str) -> Result<Option<String>, Error> {
        let pool = Arc::clone(self);
        let operation = format!("find the image {id} of {}", self.name);
        let (failed, id) = (operation.clone(), c_text("id", id)?);
        within(CALL_LIMIT, &operation, move || {
            let library = pool.cluster.library;
            let (mut image, mut name) = (std::ptr::null_mut(), [0_u8; 4096]);
            let mut length = name.len();
            // SAFETY: a context, a text that ends with NUL, no snapshot, and a valid pointer for the result; all outlive the call.
            let opened = unsafe {
                (library.rbd_open_by_id_read_only)(
                    pool.handle,
                    id.as_ptr(),
                    &mut image,
                    std::ptr::null(),
                )
            };
            if opened == -libc::ENOENT {
                return Ok(None);
            }
            check(opened, |errno| Error::failed(failed.clone(), errno, ""))?;
            // SAFETY: the image was opened above and is closed here, once; a buffer with its length.
            let result = unsafe {
                let result = (library.rbd_get_name)(image, name.as_mut_ptr().cast(), &mut length);
                (library.rbd_close)(image);
                result
            };
            check(result, |errno| Error::failed(failed, errno, ""))?;
            Ok(Some(text_in(&name)))
        })
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: created once; images that were opened through it hold the pool. librados itself counts the requests in flight.
        unsafe { (self.cluster.library.rados_ioctx_destroy)(self.handle) };
    }
}

/// Copies a C string; null becomes an empty string.
///
/// # Safety
/// `text` is null or ends with NUL.
pub(crate) unsafe fn owned_text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller guarantees the conditions of `# Safety`.
    let text = unsafe { std::ffi::CStr::from_ptr(text) };
    text.to_string_lossy().into_owned()
}

pub(crate) fn c_text(field: &'static str, text: &str) -> Result<CString, Error> {
    CString::new(text).map_err(|_| Error::Text {
        field,
        text: text.to_owned(),
    })
}

impl Cluster {
    /// Opens the pool of an image.
    ///
    /// # Errors
    /// As [`Pool::of`].
    pub fn pool_of(self: &Arc<Cluster>, image: &ImageName) -> Result<Arc<Pool>, Error> {
        Pool::of(self, &image.pool, image.namespace.as_deref()).map(Arc::new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_default_is_the_time_out_that_connecting_reads() {
        assert_eq!(DEFAULTS[0].0, "client_mount_timeout");
    }

    #[test]
    fn connection_errors_have_a_hint() {
        assert!(connect_hint(libc::EACCES, "client.x").contains("ceph auth get client.x"));
        assert!(connect_hint(libc::ENOENT, "client.x").contains("keyring="));
        assert!(connect_hint(libc::ETIMEDOUT, "client.x").contains("mon_host="));
    }
}
