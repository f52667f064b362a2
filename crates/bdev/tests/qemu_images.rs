//! Images that `qemu-img` makes are known by their formats. A process of its own: a program that is being started has the locks
//! of its parent for a moment, which other tests would meet.

use bdev::ImageFormat;

/// Needs qemu-utils. LUKS is left out: qemu-img measures the CPU for it, and gives up where that is busy.
#[test]
fn images_made_by_qemu_img_are_known() {
    let folder = tempfile::tempdir().unwrap();
    let made = [
        ("qcow2", "qcow2", ""),
        ("qcow2", "qcow2", "compat=0.10"),
        ("vmdk", "VMDK", ""),
        ("vmdk", "VMDK", "subformat=monolithicFlat"),
        ("vmdk", "VMDK", "subformat=streamOptimized"),
        ("vhdx", "VHDX", ""),
        ("vdi", "VDI", ""),
    ];
    for (index, (kind, format, option)) in made.into_iter().enumerate() {
        let path = folder.path().join(format!("{index}.{kind}"));
        let mut command = std::process::Command::new("qemu-img");
        command.args(["create", "-q", "-f", kind]);
        if !option.is_empty() {
            command.args(["-o", option]);
        }
        let output = command.arg(&path).arg("1M").output();
        let output = output.unwrap_or_else(|e| panic!("qemu-img (qemu-utils) is needed: {e}"));
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{kind} {option}: {errors}");
        let found = ImageFormat::of_path(&path).map(|found| found.to_string());
        assert_eq!(found.as_deref(), Some(format), "{kind} {option}");
    }
}
