//! Declaration of keys of a disk's block device.

use super::key::Key;
use super::model::DiskConfig;
use super::setting::Setting;
use super::value::Reader;

/// A key of a disk.
pub type DiskKey = Key<DiskConfig>;

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

/// Declares a key of block devices of these kinds. Its value is written unless it is the default, or `always`. `by (READ, VALUE)` has
/// functions for a type that is no [`Setting`].
macro_rules! device_key {
    (@read $key:ident, $reader:ident, $place:ident by ($read:expr, $value:expr)) => { $crate::device_keys::put($read($key, $reader), $place) };
    (@read $key:ident, $reader:ident, $place:ident $(always)?) => { $key.set_in($reader, $place) };
    (@get $disk:ident, $value:ident, $of:tt; by ($read:expr, $to_value:expr)) => { $to_value($value) };
    (@get $disk:ident, $value:ident, $of:tt; always) => { $crate::setting::Setting::value($value) };
    (@get $disk:ident, $value:ident, ($of:tt $place:tt);) => {{
        let default = $disk.backend.kind().config();
        let default = $crate::devices::place!(&default; $of $place)?;
        $crate::setting::Setting::value_unless($value, default)
    }};
    ($name:literal: $kind:expr; $default:expr; $help:expr; [$($device:ident)+] $place:tt $($access:tt)*) => {
        $crate::setting::key! {
            $name: $kind; $default; $crate::key::RunTime::ADD_AGAIN, of &[$($crate::devices::DeviceKind::$device.word()),+]; $help;
            read |key, reader, disk| {
                let place = $crate::devices::place!(&mut disk.backend; [$($device)+] $place);
                $crate::device_keys::device_key!(@read key, reader, place $($access)*);
            };
            get |disk| {
                let value = $crate::devices::place!(&disk.backend; [$($device)+] $place)?;
                $crate::device_keys::device_key!(@get disk, value, ([$($device)+] $place); $($access)*)
            }
        }
    };
}
pub(crate) use device_key;
