//! Declaration of keys of a disk's block device.

use super::key::Key;
use super::model::DiskConfig;
use super::setting::Setting;
use super::value::Reader;

/// A key of a disk.
pub type DiskKey = Key<DiskConfig, DiskConfig>;

impl DiskKey {
    /// Reads the value into `place`. Without a place the value is checked only.
    pub fn set_in<S: Setting>(&self, reader: &mut Reader<'_, '_>, place: Option<&mut S>) {
        put(S::read(self, reader).map(|at| at.value), place);
    }
}

/// Sets `place`, if there are a place and a value.
pub fn put<S>(value: Option<S>, place: Option<&mut S>) {
    if let (Some(value), Some(place)) = (value, place) {
        *place = value;
    }
}

/// Returns the place of a value in a block device of one of these kinds. `[KIND] { FIELD }` is a field of the variant, and `[KIND] (PATH)` a
/// field of the struct in it.
macro_rules! place {
    (@mut $config:ident ($($path:ident).+)) => { &mut $config.$($path).+ };
    (@ref $config:ident ($($path:ident).+)) => { &$config.$($path).+ };
    ($backend:expr; [$($kind:ident)+] { $field:ident }) => {
        match $backend {
            $($crate::devices::BlockDeviceConfig::$kind { $field, .. })|+ => Some($field),
            _ => None,
        }
    };
    (&mut $backend:expr; [$($kind:ident)+] $path:tt) => {
        match &mut $backend {
            $($crate::devices::BlockDeviceConfig::$kind(config) => Some($crate::disk_draft::place!(@mut config $path)),)+
            _ => None,
        }
    };
    (& $backend:expr; [$($kind:ident)+] $path:tt) => {
        match &$backend {
            $($crate::devices::BlockDeviceConfig::$kind(config) => Some($crate::disk_draft::place!(@ref config $path)),)+
            _ => None,
        }
    };
}
pub(crate) use place;

/// Declares a key of block devices of these kinds. Its value is written unless it is the default, or `always`. `by (READ, VALUE)` has
/// functions for a type that is no [`Setting`].
macro_rules! device_key {
    (@read $key:ident, $reader:ident, $place:ident by ($read:expr, $value:expr)) => { $crate::disk_draft::put($read($key, $reader), $place) };
    (@read $key:ident, $reader:ident, $place:ident $(always)?) => { $key.set_in($reader, $place) };
    (@get $disk:ident, $value:ident, $of:tt; by ($read:expr, $to_value:expr)) => { $to_value($value) };
    (@get $disk:ident, $value:ident, $of:tt; always) => { $crate::setting::Setting::value($value) };
    (@get $disk:ident, $value:ident, ($of:tt $place:tt);) => {{
        let default = $disk.backend.kind().config();
        let default = $crate::disk_draft::place!(&default; $of $place)?;
        $crate::setting::Setting::value_unless($value, default)
    }};
    ($name:literal: $kind:expr; $default:expr; $help:expr; [$($device:ident)+] $place:tt $($access:tt)*) => {
        $crate::setting::key! {
            $name: $kind; $default; $crate::key::RunTime::AddAnew, of &[$($crate::devices::DeviceKind::$device.word()),+]; $help;
            read |key, reader, disk| {
                let place = $crate::disk_draft::place!(&mut disk.backend; [$($device)+] $place);
                $crate::disk_draft::device_key!(@read key, reader, place $($access)*);
            };
            get |disk| {
                let value = $crate::disk_draft::place!(&disk.backend; [$($device)+] $place)?;
                $crate::disk_draft::device_key!(@get disk, value, ([$($device)+] $place); $($access)*)
            }
        }
    };
}
pub(crate) use device_key;
