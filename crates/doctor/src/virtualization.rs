//! KVM: availability, and delivery of interrupts without exits.

use crate::Question;
use crate::cpu::{has_flag, is_virtual};
use crate::finding::{Area, Finding};
use crate::host::Host;

pub(crate) fn examine(host: &Host, question: &Question, findings: &mut Vec<Finding>) {
    if question.is_guest {
        return;
    }
    if !host.has("/dev/kvm") {
        findings.push(without_kvm(host));
        return;
    }
    let why = "Interrupts that the CPU delivers directly to the guest cause no exit.";
    let is_off = |file: &str| matches!(host.text(file).as_deref(), Some("N" | "0"));
    if is_off("/sys/module/kvm_intel/parameters/enable_apicv") {
        let found = "KVM does not use APICv (posted interrupts)";
        let finding = Finding::worth("apicv", Area::Virtualization, found, why);
        findings.push(finding.by("modprobe -r kvm_intel && modprobe kvm_intel enable_apicv=1"));
    }
    if is_off("/sys/module/kvm_amd/parameters/avic") && has_flag(host, "avic") {
        let found = "KVM does not use AVIC, which this CPU has";
        let finding = Finding::worth("avic", Area::Virtualization, found, why);
        findings.push(finding.by("modprobe -r kvm_amd && modprobe kvm_amd avic=1"));
    }
    if host.number("/sys/module/kvm/parameters/halt_poll_ns") == Some(0) {
        let found = "KVM does not poll before it puts a virtual CPU to sleep";
        let why = "Short polling on the host wakes a virtual CPU that waits for a disk faster.";
        let finding = Finding::worth("kvm_halt_poll", Area::Virtualization, found, why);
        findings.push(finding.by_writing(
            vec!["/sys/module/kvm/parameters/halt_poll_ns".to_owned()],
            "200000",
        ));
    }
}

fn without_kvm(host: &Host) -> Finding {
    const CHECK: &str = "kvm";
    let why = "Without KVM, guests are emulated and run ten to a hundred times slower. Measurements of such guests are meaningless.";
    let can = has_flag(host, "vmx") || has_flag(host, "svm");
    if can {
        let module = if has_flag(host, "vmx") {
            "kvm_intel"
        } else {
            "kvm_amd"
        };
        let found = "/dev/kvm is missing, although the CPU supports virtualization";
        return Finding::worth(CHECK, Area::Virtualization, found, why)
            .by(format!("modprobe {module}"));
    }
    let found = match is_virtual(host) {
        true => "/dev/kvm is missing: this is a virtual machine without nested virtualization",
        false => "/dev/kvm is missing",
    };
    Finding::note(CHECK, Area::Virtualization, found, why)
}
