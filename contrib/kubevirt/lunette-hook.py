#!/usr/bin/env python3
"""onDefineDomain hook of KubeVirt: turns volumes into vhost-user disks of Lunette.

KubeVirt calls it as `onDefineDomain --vmi JSON --domain XML` and reads the changed domain from its output. The annotation
`lunette.storage/sockets` of the VirtualMachineInstance is a JSON object: name of a hostDisk volume, name of a socket in its folder.
docs/kubevirt.md describes the use.
"""
import argparse
import json
import os
import sys
import xml.etree.ElementTree as ET

ANNOTATION = "lunette.storage/sockets"


def fail(message, hint):
    sys.exit(f"lunette-hook: {message}; hint: {hint}")


def sockets(vmi):
    """Returns the name of the socket for each volume."""
    text = vmi.get("metadata", {}).get("annotations", {}).get(ANNOTATION)
    if text is None:
        return {}
    try:
        named = json.loads(text)
        valid = all(isinstance(name, str) and name and "/" not in name for name in named.values())
    except (ValueError, AttributeError):
        valid = False
    if not valid:
        fail(f"the annotation {ANNOTATION} is invalid: {text}", 'write {"VOLUME": "NAME.sock"}')
    return named


def vhost_user_disk(disk, volume, name, queues):
    """Changes a disk element in place. The target, the alias and the boot order stay."""
    source = disk.find("source")
    file = source.get("file") if source is not None else None
    if disk.get("type") != "file" or not file:
        fail(f"volume {volume} is no hostDisk", "declare it as a hostDisk in the folder of the socket")
    target = disk.find("target")
    if target is None or target.get("bus") != "virtio":
        fail(f"disk {volume} has another bus than virtio", "set disk.bus to virtio")
    for child in list(disk):
        if child.tag not in ("target", "alias", "boot", "address"):
            disk.remove(child)
    disk.set("type", "vhostuser")
    disk.set("device", "disk")
    driver = ET.Element("driver", {"name": "qemu", "type": "raw", "queues": queues})
    source = ET.Element("source", {"type": "unix", "path": os.path.join(os.path.dirname(file), name)})
    ET.SubElement(source, "reconnect", {"enabled": "yes", "timeout": "1"})
    disk.insert(0, driver)
    disk.insert(1, source)


def share_memory(domain):
    """Makes the guest's memory shareable with the daemon. Huge pages stay."""
    backing = domain.find("memoryBacking")
    if backing is None:
        backing = ET.SubElement(domain, "memoryBacking")
    for tag in ("source", "access"):
        for child in backing.findall(tag):
            backing.remove(child)
    ET.SubElement(backing, "source", {"type": "memfd"})
    ET.SubElement(backing, "access", {"mode": "shared"})


def changed(vmi, domain):
    named = sockets(vmi)
    queues = domain.findtext("vcpu", "1").strip()
    by_alias = {}
    for disk in domain.findall("devices/disk"):
        alias = disk.find("alias")
        if alias is not None:
            by_alias[alias.get("name", "").removeprefix("ua-")] = disk
    for volume, name in named.items():
        if volume not in by_alias:
            fail(f"there is no disk {volume}", f"name a disk of the instance in {ANNOTATION}")
        vhost_user_disk(by_alias[volume], volume, name, queues)
    if named:
        share_memory(domain)
    return domain


def main():
    parser = argparse.ArgumentParser(description="Turn volumes of a KubeVirt domain into vhost-user disks")
    parser.add_argument("--vmi", required=True, help="VirtualMachineInstance as JSON")
    parser.add_argument("--domain", required=True, help="domain as XML")
    arguments = parser.parse_args()
    ET.register_namespace("qemu", "http://libvirt.org/schemas/domain/qemu/1.0")
    domain = changed(json.loads(arguments.vmi), ET.fromstring(arguments.domain))
    print(ET.tostring(domain, encoding="unicode"))


if __name__ == "__main__":
    main()
