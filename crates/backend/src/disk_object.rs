//! A named disk: an engine and the identity that every export of it shows.
//!
//! Serial number and NAA identifier come from the machine, the name and the serial if one is given, so they survive
//! restarts and do not depend on the engine. Made by the control plane; shared by all workers.

use std::io;
use std::sync::{Arc, OnceLock};

use disk::DiskInfo;
use ring::{Owner, Ring};

use crate::{Backend, Engine, Gate, OpenError};

/// The most that virtio-blk's `GET_ID` holds (virtio 1.3, 5.2.6).
const SERIAL_BYTES_MAX: usize = 20;

/// A named disk.
#[derive(Clone, Debug)]
pub struct Disk {
    name: Arc<str>,
    engine: Arc<dyn Engine>,
    info: Arc<DiskInfo>,
    gate: Arc<Gate>,
}

impl Disk {
    /// Gives an engine a name and an identity.
    ///
    /// # Errors
    /// When the serial does not fit into 20 printable ASCII characters.
    pub fn new(
        name: &str,
        serial: Option<&str>,
        engine: Arc<dyn Engine>,
    ) -> Result<Disk, OpenError> {
        let naa = naa_of(&[machine(), name, serial.unwrap_or_default()]);
        let serial = match serial {
            Some(given) if is_serial(given) => given.to_owned(),
            Some(given) => {
                return Err(OpenError::Serial {
                    found: given.to_owned(),
                });
            }
            None if is_serial(name) => name.to_owned(),
            // A long name cut short might be another disk's: its identifier is not.
            None => format!("lunette-{:012x}", naa & 0xffff_ffff_ffff),
        };
        let info = DiskInfo {
            serial,
            naa,
            ..engine.info()
        };
        Ok(Disk {
            name: name.into(),
            engine,
            info: Arc::new(info),
            gate: Arc::default(),
        })
    }

    /// The name it was given.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Shape, abilities and identity.
    pub fn info(&self) -> &Arc<DiskInfo> {
        &self.info
    }

    /// Opens a worker's own handle: [`Engine::open`].
    ///
    /// # Errors
    /// What the engine says.
    pub fn open(&self, owner: Owner, ring: &mut Ring) -> io::Result<Box<dyn Backend>> {
        self.engine.open(owner, ring)
    }

    /// Ranges that are held against all other changes.
    pub fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    /// What does its I/O.
    pub fn engine(&self) -> &Arc<dyn Engine> {
        &self.engine
    }
}

fn is_serial(text: &str) -> bool {
    (1..=SERIAL_BYTES_MAX).contains(&text.len()) && text.bytes().all(|b| matches!(b, b' '..=b'~'))
}

/// What tells this machine from others, so that two hosts' disks of one name are not taken for two paths to one disk.
fn machine() -> &'static str {
    static MACHINE: OnceLock<String> = OnceLock::new();
    // Without it (a container, say) names alone have to differ.
    MACHINE.get_or_init(|| std::fs::read_to_string("/etc/machine-id").unwrap_or_default())
}

/// NAA 3h, locally assigned (SPC-5, 7.8.6.5): 60 bits of the words' FNV-1a hash, stirred.
fn naa_of(words: &[&str]) -> u64 {
    let bytes = words.iter().flat_map(|word| word.bytes().chain([0]));
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    // FNV mixes late bytes badly into the low bits; one round of a multiply-shift finaliser mends that.
    let hash = (hash ^ (hash >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    let hash = hash ^ (hash >> 32);
    (3 << 60) | (hash & ((1 << 60) - 1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Null, NullOptions};

    fn disk(name: &str, serial: Option<&str>) -> Result<Disk, OpenError> {
        let engine = Null::create(NullOptions {
            size: 1 << 20,
            ..NullOptions::default()
        })?;
        Disk::new(name, serial, Arc::new(engine))
    }

    #[test]
    fn identity_comes_from_the_name() {
        let a = disk("d0", None).unwrap();
        let b = disk("d1", None).unwrap();
        assert_eq!(a.info().serial, "d0");
        assert_eq!(a.info().naa >> 60, 3);
        assert_ne!(a.info().naa, b.info().naa);
        // Written down: it must not change from release to release.
        assert_eq!(naa_of(&["machine", "d0", ""]), 0x302f_055a_5bf3_d30e);
    }

    #[test]
    fn serial_is_20_printable_characters_at_most() {
        assert_eq!(disk("d0", Some("S 1")).unwrap().info().serial, "S 1");
        assert!(disk("d0", Some("123456789012345678901")).is_err());
        assert!(disk("d0", Some("\u{fc}")).is_err());
        assert!(disk("d0", Some("")).is_err());
        let long = disk("a-name-of-more-than-twenty-bytes", None).unwrap();
        assert_eq!(long.info().serial.len(), 20);
        assert!(long.info().serial.starts_with("lunette-"));
    }
}
