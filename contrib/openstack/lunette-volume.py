#!/usr/bin/env python3
"""Prints a Lunette configuration and a libvirt disk for a Cinder volume.

Reads the connection information of a volume attachment as JSON from standard input, as Cinder or `openstack volume attachment` returns it, with
`driver_volume_type` iscsi or rbd. docs/openstack.md describes the use.
"""
import argparse
import json
import os
import pwd
import sys
from xml.sax.saxutils import quoteattr


def fail(message, hint):
    sys.exit(f"lunette-volume: {message}; hint: {hint}")


def text(value):
    """Returns a string of TOML, whose basic strings have the escapes of JSON."""
    return json.dumps(str(value))


def write_secret(data, options):
    """Writes the CHAP secret to a file that only the daemon's user reads: the daemon refuses other modes than 600."""
    if not options.chap_file:
        fail("the volume needs CHAP", "name a file for the secret with --chap-file")
    line = f"{data['auth_username']} {data['auth_password']}\n"
    owner = options.chap_owner
    try:
        user = int(owner) if owner.isdigit() else pwd.getpwnam(owner).pw_uid
        descriptor = os.open(options.chap_file, os.O_WRONLY | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(descriptor, 0o600)
            os.fchown(descriptor, user, -1)
            file.truncate(0)
            file.write(line)
    except (KeyError, OSError) as error:
        fail(f"cannot write {options.chap_file} for the user {owner}: {error}", "run as root, and name the daemon's user with --chap-owner")


def iscsi(data, options):
    """Returns the keys of a disk on a logical unit. Further portals become paths."""
    portals = data.get("target_portals") or [data["target_portal"]]
    names = data.get("target_iqns") or [data["target_iqn"]]
    units = data.get("target_luns") or [data.get("target_lun", 0)]
    user = ""
    keys = {}
    if data.get("auth_method") == "CHAP":
        user = f"{data['auth_username']}@"
        # The domain does not need the secret.
        if options.output == "toml":
            write_secret(data, options)
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


def read_connection():
    """Returns the connection information of standard input, with the fields of the volume."""
    hint = "pass the attachment as JSON, with `-f json`"
    try:
        connection = json.load(sys.stdin)
    except ValueError as error:
        fail(f"the input is not JSON: {error}", hint)
    # Cinder's API has `connection_info`, the command `openstack` prints it as `Properties`, os-brick and Nova have its content alone.
    if isinstance(connection, dict):
        connection = connection.get("connection_info") or connection.get("Properties") or connection
    # An RBD volume has its fields beside the type in old answers and below `data` in others.
    data = connection.get("data", connection) if isinstance(connection, dict) else None
    if not isinstance(data, dict):
        fail("the connection information is not a JSON object", hint)
    return connection, data


def main():
    parser = argparse.ArgumentParser(description="Serve a Cinder volume to a guest of libvirt with Lunette")
    parser.add_argument("--name", required=True, help="name of the disk and of its export")
    parser.add_argument("--sockets", default="/run/lunette", help="folder of the sockets")
    parser.add_argument("--chap-file", help="file for the CHAP secret, written with mode 600")
    parser.add_argument("--chap-owner", default="lunette", help="user of the daemon, who owns that file (default: lunette)")
    parser.add_argument("--target", default="vdb", help="name of the disk in the domain")
    parser.add_argument("--queues", type=int, default=1, help="number of queues, at most the number of vCPUs")
    parser.add_argument("output", choices=["toml", "xml"])
    options = parser.parse_args()
    connection, data = read_connection()
    kind = connection.get("driver_volume_type")
    if kind not in KINDS:
        fail(f"volumes of the type {kind} are not supported", "use a volume type with an iscsi or rbd back end")
    socket = f"{options.sockets}/{options.name}.sock"
    if connection.get("encrypted") or data.get("encrypted"):
        fail("the volume is encrypted, and Lunette does not decrypt it", "use a volume type without encryption")
    try:
        keys = KINDS[kind](data, options)
    except KeyError as error:
        fail(f"the connection information lacks {error}", "pass the whole connection_info of the attachment")
    if "ro" in (connection.get("access_mode"), data.get("access_mode")):
        keys["read_only"] = "true"
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
