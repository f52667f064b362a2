#!/usr/bin/env python3
"""Prints a Lunette configuration and a libvirt disk for a Cinder volume.

Reads the connection information of a volume attachment as JSON from standard input, as Cinder or `openstack volume attachment` returns it, with
`driver_volume_type` iscsi or rbd. docs/openstack.md describes the use.
"""
import argparse
import json
import os
import sys
from xml.sax.saxutils import quoteattr


def fail(message, hint):
    sys.exit(f"lunette-volume: {message}; hint: {hint}")


def text(value):
    """Returns a string of TOML, whose basic strings have the escapes of JSON."""
    return json.dumps(str(value))


def iscsi(data, options):
    """Returns the keys of a disk on a logical unit. Further portals become paths."""
    portals = data.get("target_portals") or [data["target_portal"]]
    names = data.get("target_iqns") or [data["target_iqn"]]
    units = data.get("target_luns") or [data.get("target_lun", 0)]
    user = ""
    keys = {}
    if data.get("auth_method") == "CHAP":
        user = f"{data['auth_username']}@"
        if not options.chap_file:
            fail("the volume needs CHAP", "name a file for the secret with --chap-file")
        descriptor = os.open(options.chap_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{data['auth_username']} {data['auth_password']}\n")
        keys["chap_file"] = text(options.chap_file)
    if len(set(names)) > 1 or len(set(units)) > 1:
        fail("the paths have different targets or units", "attach the volume without multipath")
    keys = {"unit": text(f"iscsi://{user}{portals[0]}/{names[0]}/{units[0]}"), **keys}
    if portals[1:]:
        keys["paths"] = text(" ".join(portals[1:]))
    return keys


def rbd(data, _options):
    """Returns the keys of a disk on an RBD image."""
    hosts = zip(data.get("hosts", []), data.get("ports", []))
    monitors = ",".join(f"{host}:{port}" for host, port in hosts)
    keys = {"image": text(data["name"])}
    if data.get("auth_username"):
        keys["id"] = text(data["auth_username"])
    if monitors:
        keys["mon_host"] = text(monitors)
    return keys


KINDS = {"iscsi": iscsi, "rbd": rbd}


def main():
    parser = argparse.ArgumentParser(description="Serve a Cinder volume to a guest of libvirt with Lunette")
    parser.add_argument("--name", required=True, help="name of the disk and of its export")
    parser.add_argument("--sockets", default="/run/lunette", help="folder of the sockets")
    parser.add_argument("--chap-file", help="file for the CHAP secret, written with mode 600")
    parser.add_argument("--target", default="vdb", help="name of the disk in the domain")
    parser.add_argument("--queues", type=int, default=1, help="number of queues, at most the number of vCPUs")
    parser.add_argument("output", choices=["toml", "xml"])
    options = parser.parse_args()
    connection = json.load(sys.stdin)
    # Cinder's API has `connection_info`, the command `openstack` prints it as `Properties`, os-brick and Nova have its content alone.
    connection = connection.get("connection_info") or connection.get("Properties") or connection
    kind = connection.get("driver_volume_type")
    if kind not in KINDS:
        fail(f"volumes of the type {kind} are not supported", "use a volume type with an iscsi or rbd back end")
    socket = f"{options.sockets}/{options.name}.sock"
    # An RBD volume has its fields beside the type in old answers and below `data` in others.
    data = connection.get("data", connection)
    try:
        keys = KINDS[kind](data, options)
    except KeyError as error:
        fail(f"the connection information lacks {error}", "pass the whole connection_info of the attachment")
    if options.output == "toml":
        print("[[disk]]")
        print(f"name = {text(options.name)}")
        print(f"backend = {text(kind)}")
        for key, value in keys.items():
            print(f"{key} = {value}")
        print("\n[[vhost_blk]]")
        print(f"disk = {text(options.name)}")
        print(f"socket = {text(socket)}")
        print(f"queues = {options.queues}")
    else:
        print("<disk type='vhostuser' device='disk'>")
        print(f"  <driver name='qemu' type='raw' queues='{options.queues}'/>")
        print(f"  <source type='unix' path={quoteattr(socket)}>")
        print("    <reconnect enabled='yes' timeout='1'/>")
        print("  </source>")
        print(f"  <target dev={quoteattr(options.target)} bus='virtio'/>")
        print("</disk>")


if __name__ == "__main__":
    main()
