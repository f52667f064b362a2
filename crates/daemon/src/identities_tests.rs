//! Operations on real files that keep or change the identity of a disk.

use std::path::Path;

use rustix::fs::{XattrFlags, lgetxattr, lsetxattr};
use scsi::{MemoryStore, Store};

use super::*;
use crate::disks::{Devices, open_all};
use crate::state_files::DamagedFiles;
use config::{Flags, Surroundings, parse};

const ATTRIBUTE: &str = "user.lunette.identity";

fn config(flags: &[&str]) -> Config {
    let flags = Flags {
        disk: flags.iter().map(|flag| (*flag).to_owned()).collect(),
        ..Flags::default()
    };
    let config = parse(None, &flags, &Surroundings::of_this_process());
    config.unwrap_or_else(|mistakes| panic!("{mistakes}"))
}

/// Opens disks beside others. Returns the disks, or the reasons for a failure.
fn opened_beside(
    known: &Disks,
    identities: &Identities,
    store: &dyn Store,
    flags: &[&str],
) -> Result<Disks, Vec<String>> {
    // Parsed separately: the configuration check refuses two paths to one file.
    let configs = flags.iter().flat_map(|flag| config(&[*flag]).disks);
    let configs: Vec<DiskConfig> = configs.collect();
    let opening = open_all(&configs, Devices::new(), known, identities, store);
    if !opening.failed.is_empty() {
        return Err(opening.reasons());
    }
    for (_, one) in opening.unwritten() {
        one.write(store);
    }
    Ok(opening.disks())
}

fn opened(store: &dyn Store, flags: &[&str]) -> Disks {
    let (known, identities) = (Disks::new(), Identities::default());
    opened_beside(&known, &identities, store, flags).unwrap_or_else(|reasons| panic!("{reasons:?}"))
}

/// Returns the identity of one served file under any disk name.
fn identity(store: &dyn Store, name: &str, path: &Path, options: &str) -> Identity {
    let flag = format!("{name}=file:{}{options}", path.display());
    opened(store, &[&flag])[name].info().identity
}

fn attribute(path: &Path) -> Option<String> {
    let mut value = [0; 4096];
    let length = lgetxattr(path, ATTRIBUTE, &mut value[..]).ok()?;
    Some(String::from_utf8_lossy(&value[..length]).into_owned())
}

fn set_attribute(path: &Path, value: &[u8]) {
    lsetxattr(path, ATTRIBUTE, value, XattrFlags::empty()).unwrap();
}

/// Copies a file like `cp --preserve=xattr`.
fn copy(from: &Path, to: &Path) {
    std::fs::copy(from, to).unwrap();
    set_attribute(to, attribute(from).unwrap().as_bytes());
}

fn new_file(path: &Path) {
    std::fs::write(path, [0; 8192]).unwrap();
}

const CACHED: &str = ",cache=writeback";

#[test]
fn file_keeps_its_identity_through_renames_without_state() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a.raw"), folder.path().join("b.raw"));
    let store = MemoryStore::default;
    let first = identity(&store(), "d0", &a, ",cache=writeback,size=1M");
    assert!(attribute(&a).unwrap().contains(&first.to_string()));
    assert_eq!(identity(&store(), "d0", &a, CACHED), first);
    assert_eq!(identity(&store(), "other-name", &a, CACHED), first);
    assert_eq!(
        identity(&store(), "d0", &a, ",cache=writeback,ro=on"),
        first
    );
    std::fs::rename(&a, &b).unwrap();
    assert_eq!(identity(&store(), "d0", &b, CACHED), first);
    let place = format!("path={}", b.canonicalize().unwrap().display());
    assert!(attribute(&b).unwrap().ends_with(&place));
    // Moved to another file system: copied, then removed.
    copy(&b, &a);
    std::fs::remove_file(&b).unwrap();
    assert_eq!(identity(&store(), "d0", &a, CACHED), first);
    assert_eq!(identity(&store(), "d0", &a, CACHED), first);
    // A new file at the same path is another disk.
    std::fs::remove_file(&a).unwrap();
    assert_ne!(
        identity(&store(), "d0", &a, ",cache=writeback,size=1M"),
        first
    );
}

#[test]
fn copy_is_another_disk_while_its_original_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a.raw"), folder.path().join("b.raw"));
    new_file(&a);
    let store = MemoryStore::default();
    let original = identity(&store, "d0", &a, CACHED);
    copy(&a, &b);
    let clone = identity(&store, "d1", &b, CACHED);
    assert_ne!(clone, original);
    assert_eq!(identity(&store, "d1", &b, CACHED), clone, "for good");
    assert_eq!(identity(&store, "d0", &a, CACHED), original);
    // A read-only copy also gets a new identity.
    copy(&a, &b);
    let read_only = identity(&store, "d1", &b, ",cache=writeback,ro=on");
    assert_ne!(read_only, original);
    std::fs::remove_file(&a).unwrap();
    let again = identity(&store, "d1", &b, ",cache=writeback,ro=on");
    assert_eq!(again, read_only, "also without its original");
    assert_eq!(
        identity(&store, "d1", &b, CACHED),
        read_only,
        "and written to"
    );
}

#[test]
fn one_of_two_indistinguishable_files_gets_another_identity() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let flag = |name: &str| format!("{name}=file:{},cache=writeback", path(name).display());
    new_file(&path("template"));
    let store = MemoryStore::default();
    let template = identity(&store, "d", &path("template"), CACHED);
    // The original was renamed, and the copy comes first in the configuration.
    copy(&path("template"), &path("copy"));
    std::fs::rename(path("template"), path("original")).unwrap();
    let disks = opened(&store, &[&flag("copy"), &flag("original")]);
    assert_eq!(disks["original"].info().identity, template);
    assert_ne!(disks["copy"].info().identity, template);
    drop(disks);
    // Two copies of a removed original.
    copy(&path("original"), &path("one"));
    copy(&path("original"), &path("two"));
    std::fs::remove_file(path("original")).unwrap();
    let disks = opened(&store, &[&flag("one"), &flag("two")]);
    assert_ne!(disks["one"].info().identity, disks["two"].info().identity);
    // Beside a disk that is already served.
    copy(&path("one"), &path("three"));
    std::fs::rename(path("one"), path("moved")).unwrap();
    let (identities, three) = (Identities::default(), flag("three"));
    let more = opened_beside(&disks, &identities, &store, &[&three]).unwrap();
    assert_ne!(more["three"].info().identity, disks["one"].info().identity);
}

#[test]
fn one_file_under_two_names_is_one_disk() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a.raw"), folder.path().join("b.raw"));
    new_file(&a);
    std::os::unix::fs::symlink(&a, &b).unwrap();
    let flag =
        |name: &str, path: &Path| format!("{name}=file:{},cache=writeback,ro=on", path.display());
    let both = [flag("d0", &a), flag("d1", &b)];
    let both = both.each_ref().map(String::as_str);
    let (store, identities) = (MemoryStore::default(), Identities::default());
    let refused = |known: &Disks, flags: &[&str]| {
        let reasons = opened_beside(known, &identities, &store, flags).unwrap_err();
        assert_eq!(reasons.len(), 1, "{reasons:?}");
        assert!(reasons[0].starts_with("disk d1: ") && reasons[0].contains(" disk d0"));
    };
    // A new file twice at once, a second time while it is served, and with an identity.
    refused(&Disks::new(), &both);
    let one = opened(&store, &both[..1]);
    refused(&one, &both[1..]);
    drop(one);
    identity(&store, "d0", &a, CACHED);
    refused(&Disks::new(), &both);
}

#[test]
fn identity_without_attributes_is_in_the_state_folder() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a.raw"), folder.path().join("b.raw"));
    new_file(&a);
    let store = MemoryStore::default();
    let read_only = ",cache=writeback,ro=on";
    let first = identity(&store, "d0", &a, read_only);
    assert_eq!(attribute(&a), None, "nothing is written to it");
    assert_eq!(identity(&store, "other-name", &a, read_only), first);
    // Another file at the same path is another disk.
    std::thread::sleep(std::time::Duration::from_millis(20));
    new_file(&b);
    std::fs::rename(&b, &a).unwrap();
    let second = identity(&store, "d0", &a, read_only);
    assert_ne!(second, first);
    // Once the file is writable, it has the identity as an attribute.
    assert_eq!(identity(&store, "d0", &a, CACHED), second);
    assert_eq!(identity(&MemoryStore::default(), "d0", &a, CACHED), second);
}

/// Store with one fixed state for all keys.
struct Fixed(Result<Option<Vec<u8>>, scsi::Unusable>);

impl Store for Fixed {
    fn load(&self, _: &str) -> Result<Option<Vec<u8>>, scsi::Unusable> {
        self.0.clone()
    }
    fn save(&self, _: &str, _: &[u8]) -> std::io::Result<()> {
        Err(std::io::ErrorKind::StorageFull.into())
    }
}

fn refused(identities: &Identities, store: &dyn Store, flags: &[&str]) -> String {
    let opened = opened_beside(&Disks::new(), identities, store, flags);
    opened.expect_err("the disk has no identity").join("; ")
}

#[test]
fn disk_whose_identity_is_damaged_is_unavailable() {
    let folder = tempfile::tempdir().unwrap();
    let (a, identities) = (folder.path().join("a.raw"), Identities::default());
    new_file(&a);
    let flag = format!("d0=file:{},cache=writeback", a.display());
    let damaged = [
        Fixed(Ok(Some(b"d0".to_vec()))),
        Fixed(Err(scsi::Unusable("identity is cut short".to_owned()))),
    ];
    for store in &damaged {
        let reason = refused(&identities, store, &[&flag, "r=ram:1M"]);
        assert!(
            reason.contains("disk d0: its identity is unknown"),
            "{reason}"
        );
        assert!(!reason.contains("disk r"), "{reason}");
        assert_eq!(attribute(&a), None, "no other identity is written");
    }
    let nothing = Fixed(Ok(None));
    for spoilt in [&b"d0"[..], b"", &[0xff; 3000]] {
        set_attribute(&a, spoilt);
        let reason = refused(&identities, &nothing, &[&flag]);
        assert!(reason.contains("user.lunette.identity"), "{reason}");
        assert_eq!(attribute(&a).unwrap(), String::from_utf8_lossy(spoilt));
    }
    // An identity that was set by hand is used for this file.
    let by_hand = "6f9619ff-8b86-4011-b42d-00c04fc964ff";
    set_attribute(&a, by_hand.as_bytes());
    assert_eq!(identity(&nothing, "d0", &a, CACHED).to_string(), by_hand);
    assert!(attribute(&a).unwrap().contains(" inode="));
}

#[test]
fn disk_whose_attribute_is_damaged_is_unavailable() {
    let folder = tempfile::tempdir().unwrap();
    let (a, identities) = (folder.path().join("a.raw"), Identities::default());
    new_file(&a);
    let store = MemoryStore::default();
    let first = identity(&store, "d0", &a, CACHED);
    let whole = attribute(&a).unwrap().into_bytes();
    let length = whole.len();
    let changed = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        bytes
    };
    let record = &whole[whole.iter().position(|byte| *byte == b'\n').unwrap() + 1..];
    assert!(record.starts_with(first.to_string().as_bytes()));
    for damaged in [
        Vec::new(),
        whole[..length / 2].to_vec(),
        whole[..length - 1].to_vec(),
        changed(0),
        changed(length - record.len()),
        changed(length - 1),
    ] {
        set_attribute(&a, &damaged);
        let flag = format!("d0=file:{},cache=writeback", a.display());
        let reason = refused(&identities, &store, &[&flag]);
        assert!(reason.contains("user.lunette.identity"), "{reason}");
        assert_eq!(attribute(&a).unwrap().as_bytes(), damaged, "it stays");
    }
    set_attribute(&a, &whole);
    assert_eq!(identity(&store, "d0", &a, CACHED), first);
    // The form of earlier versions counts until the disk is opened for writing.
    set_attribute(&a, record);
    for options in [",cache=writeback,ro=on", CACHED] {
        assert_eq!(attribute(&a).unwrap().as_bytes(), record);
        assert_eq!(identity(&store, "d0", &a, options), first);
    }
    assert_eq!(attribute(&a).unwrap().as_bytes(), whole);
    // Without an attribute it is another disk.
    rustix::fs::removexattr(&a, ATTRIBUTE).unwrap();
    assert_ne!(identity(&store, "d0", &a, CACHED), first);
}

#[test]
fn ram_disks_are_unavailable_until_damaged_identities_are_reset() {
    let folder = tempfile::tempdir().unwrap();
    let (file, store) = (folder.path().join(VOLATILE), MemoryStore::default());
    let (ram, damaged) = (["r=ram:1M"], DamagedFiles::default());
    for content in ["", "{", "{\"r\":{\"backend\":\"ram\",\"identity\":\"x\"}}"] {
        std::fs::write(&file, content).unwrap();
        let mut identities = Identities::load(Some(folder.path()), &damaged);
        let reason = refused(&identities, &store, &ram);
        assert!(reason.contains(VOLATILE), "{reason}");
        identities.keep_volatile(&config(&ram), &Disks::new());
        assert_eq!(std::fs::read_to_string(&file).unwrap(), content, "it stays");
    }
    std::fs::write(&file, "{").unwrap();
    let mut identities = Identities::load(Some(folder.path()), &damaged);
    assert_eq!(damaged.all().len(), 1);
    identities.reset().unwrap();
    assert_eq!(damaged.all(), []);
    let disks = opened_beside(&Disks::new(), &identities, &store, &ram).unwrap();
    identities.keep_volatile(&config(&ram), &disks);
    let again = Identities::load(Some(folder.path()), &damaged);
    let again = opened_beside(&Disks::new(), &again, &store, &ram).unwrap();
    assert_eq!(again["r"].info().identity, disks["r"].info().identity);
}

#[test]
fn ram_disk_keeps_its_identity_until_it_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let store = MemoryStore::default();
    let flags = ["r=ram:1M", "n=null:1M", "w=delay:1ms,size=1M"];
    let start = |flags: &[&str]| {
        let mut identities = Identities::load(Some(folder.path()), &DamagedFiles::default());
        let disks = opened_beside(&Disks::new(), &identities, &store, flags).unwrap();
        identities.keep_volatile(&config(flags), &disks);
        let of = |(name, disk): (&String, &Arc<Disk>)| (name.clone(), disk.info().identity);
        disks.iter().map(of).collect::<BTreeMap<_, _>>()
    };
    let first = start(&flags);
    assert_eq!(start(&flags), first);
    assert_eq!(start(&flags[1..]).len(), 2, "r was removed");
    let last = start(&flags);
    assert_ne!(last["r"], first["r"]);
    assert_eq!((last["n"], last["w"]), (first["n"], first["w"]));
    // A disk that could not be opened at a start keeps its identity.
    let mut identities = Identities::load(Some(folder.path()), &DamagedFiles::default());
    let (known, some) = (Disks::new(), &flags[1..]);
    let disks = opened_beside(&known, &identities, &store, some).unwrap();
    identities.keep_volatile(&config(&flags), &disks);
    assert_eq!(start(&flags), last);
    // A disk of another kind gets a new identity.
    assert_ne!(start(&["n=ram:1M"])["n"], first["n"]);
    // Two daemons with the same configuration and without a folder.
    let fresh = || opened(&store, &["r=ram:1M"])["r"].info();
    let (one, other) = (fresh(), fresh());
    assert_ne!(one.identity, other.identity);
    assert_ne!((&one.serial, one.naa), (&other.serial, other.naa));
    assert_ne!(
        one.vendor_specific_identifier(),
        other.vendor_specific_identifier()
    );
}

#[test]
fn new_identity_is_refused_where_the_file_cannot_hold_it() {
    let folder = tempfile::tempdir().unwrap();
    let a = folder.path().join("a.raw");
    new_file(&a);
    let store = MemoryStore::default();
    let renewed = |options: &str| {
        let disks = opened(&store, &[&format!("d=file:{}{options}", a.display())]);
        let before = disks["d"].info();
        let renewed = Identities::write_new(&disks["d"], &store);
        let renewed = renewed.map(|identity| disks["d"].set_identity(identity));
        let after = disks["d"].info();
        assert_eq!(before.identity != after.identity, renewed.is_ok());
        assert_eq!(before.serial != after.serial, renewed.is_ok());
        renewed.map(|()| after.identity)
    };
    let read_only = ",cache=writeback,ro=on";
    let first = renewed(read_only).unwrap();
    assert_eq!(identity(&store, "d", &a, read_only), first);
    let second = renewed(CACHED).unwrap();
    assert_eq!(identity(&store, "d", &a, CACHED), second);
    assert_eq!(identity(&store, "d", &a, read_only), second);
    assert!(renewed(read_only).unwrap_err().contains("attribute"));
    assert_eq!(identity(&store, "d", &a, read_only), second);
}

#[test]
fn a_device_has_a_record_under_its_own_name() {
    struct Device;
    impl Medium for Device {
        fn key(&self) -> String {
            "wwid naa.5000c500a1b2c3d4".to_owned()
        }
        fn stamp(&self) -> Option<bdev::Stamp> {
            None
        }
        fn attribute(&self) -> std::io::Result<Option<Vec<u8>>> {
            Err(std::io::ErrorKind::Unsupported.into())
        }
        fn set_attribute(&self, _: &[u8]) -> std::io::Result<()> {
            Err(std::io::ErrorKind::Unsupported.into())
        }
        fn is_copy_of(&self, _: &IdentityRecord) -> bool {
            false
        }
        fn reopen(&self) -> std::io::Result<OwnedFd> {
            Err(std::io::ErrorKind::Unsupported.into())
        }
    }
    let store = MemoryStore::default();
    let claim = claim_medium("d", &Device, &store).unwrap();
    assert_eq!(claim.certainty, Certainty::New);
    save(&Device, &record(claim.identity, &Device), &store).unwrap();
    let again = claim_medium("d", &Device, &store).unwrap();
    assert_eq!(
        (again.identity, again.certainty),
        (claim.identity, Certainty::Written)
    );
    assert!(!again.is_stale, "nothing is written at every start");
}

#[test]
fn identity_of_the_medium_has_no_record_until_replaced() {
    struct Image;
    impl Medium for Image {
        fn key(&self) -> String {
            "rbd:fsid/1/10b8".to_owned()
        }
        fn own_identity(&self) -> Option<Identity> {
            Some(Identity::from_random_bits(7))
        }
        fn stamp(&self) -> Option<bdev::Stamp> {
            None
        }
        fn attribute(&self) -> std::io::Result<Option<Vec<u8>>> {
            Ok(None)
        }
        fn set_attribute(&self, _: &[u8]) -> std::io::Result<()> {
            Err(std::io::ErrorKind::Unsupported.into())
        }
        fn is_copy_of(&self, _: &IdentityRecord) -> bool {
            false
        }
        fn reopen(&self) -> std::io::Result<OwnedFd> {
            Err(std::io::ErrorKind::Unsupported.into())
        }
    }
    for _ in 0..2 {
        let claim = claim_medium("d", &Image, &MemoryStore::default()).unwrap();
        assert_eq!(
            (claim.identity, claim.certainty, claim.is_stale),
            (Identity::from_random_bits(7), Certainty::Written, false)
        );
    }
    let store = MemoryStore::default();
    let replaced = Identity::random();
    save(&Image, &record(replaced, &Image), &store).unwrap();
    let claim = claim_medium("d", &Image, &store).unwrap();
    assert_eq!(claim.identity, replaced);
}
