//! Unread messages of a front end are closed with its connection, which may take as long as the front end wants. This delays only that
//! front end.

mod support;

use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use bdev::{Fault, FaultAction, FaultPlan, Faulty};
use block::IoKind;
use reactor::PollLimit;
use support::{Rig, connect, eventually, lingering, ram, start_blk};
use vhost_frontend::{Channel, FrontEnd, Options, kind, protocol_feature, request};

const SOON: Duration = Duration::from_secs(20);

/// Sends a message with the only descriptor of `socket`. Returns false if the connection is closed.
fn send_away(channel: &Channel, socket: &mut Option<TcpStream>) -> bool {
    let Some(fd) = socket.take() else {
        return false;
    };
    let sent = channel.send(request::SET_OWNER, 0, &[], &[fd.as_fd()]);
    if sent.is_err() {
        *socket = Some(fd);
    }
    sent.is_ok()
}

/// Sends the message on a connection that is refused after the message.
fn send_unasked(path: &Path, socket: TcpStream) -> Channel {
    let (mut socket, mut sent) = (Some(socket), None);
    eventually("a message before the refusal", || {
        let channel = Channel::connect(path).unwrap();
        let is_sent = send_away(&channel, &mut socket);
        sent = Some(channel);
        is_sent
    });
    sent.unwrap()
}

/// Returns true if front ends of this socket are served and the server responds while the peer blocks a close.
fn serves_others(rig: &Rig, socket: &Path, peer: TcpStream) -> bool {
    let (sender, result) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let connected = FrontEnd::connect(socket, &Options::default()).map(drop);
            rig.server.config_changed("bad");
            sender
                .send(connected.is_ok() && rig.server.status().len() == 2)
                .ok();
        });
        let result_of_others = result.recv_timeout(SOON);
        drop(peer);
        result_of_others == Ok(true)
    })
}

#[test]
fn of_a_front_end_that_is_refused() {
    let rig = Rig::polling(1, PollLimit::Never);
    let (bad, good) = (rig.serve_ram("bad", 1), rig.serve_ram("good", 1));
    let first = connect(&bad);
    let (socket, peer) = lingering();
    send_unasked(&bad, socket);
    assert!(serves_others(&rig, &good, peer));
    drop(first);
    eventually("its session ends", || !rig.is_connected("bad"));
    connect(&bad);
}

#[test]
fn of_a_session_that_ends() {
    let rig = Rig::polling(1, PollLimit::Never);
    let (bad, good) = (rig.serve_ram("bad", 1), rig.serve_ram("good", 1));
    let (socket, peer) = lingering();
    let mut socket = Some(socket);
    eventually("a message behind the last one that is read", || {
        let channel = Channel::connect(&bad).unwrap();
        channel.send_bytes(&[0xff; 12], &[]).unwrap();
        send_away(&channel, &mut socket)
    });
    // The next front end does not wait for the rest of the close.
    connect(&bad);
    assert!(serves_others(&rig, &good, peer));
}

#[test]
fn of_a_channel_that_makes_way_for_another() {
    let rig = Rig::polling(1, PollLimit::Never);
    let (bad, good) = (rig.serve_ram("bad", 1), rig.serve_ram("good", 1));
    let front_end = connect(&bad);
    let payload = (protocol_feature::BACKEND_REQ | protocol_feature::REPLY_ACK).to_ne_bytes();
    let agree = request::SET_PROTOCOL_FEATURES;
    front_end.acknowledged(agree, &payload, &[]).unwrap();
    let give = |channel: UnixStream| {
        let give = request::SET_BACKEND_REQ_FD;
        front_end.channel().send(give, 0, &[], &[channel.as_fd()])
    };
    let (socket, peer) = lingering();
    let (ours, theirs) = UnixStream::pair().unwrap();
    assert!(send_away(&Channel::from_stream(ours), &mut Some(socket)));
    give(theirs).unwrap();
    give(UnixStream::pair().unwrap().0).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    assert!(serves_others(&rig, &good, peer));
}

#[test]
fn of_an_export_that_is_removed() {
    let rig = Rig::polling(1, PollLimit::Never);
    let (bad, good) = (rig.serve_ram("bad", 1), rig.serve_ram("good", 1));
    let first = connect(&bad);
    let [(one, peer), (other, another_peer)] = [lingering(), lingering()];
    let peers = (peer, another_peer);
    send_unasked(&bad, one).wait_closed(SOON).unwrap();
    // This connection is not accepted meanwhile.
    drop((send_unasked(&bad, other), first));
    let (sender, result) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| sender.send(rig.server.remove("bad")).ok());
        let removed = result.recv_timeout(SOON);
        let connected = FrontEnd::connect(&good, &Options::default()).map(drop);
        drop(peers);
        assert_eq!(removed, Ok(true));
        connected.unwrap();
    });
}

/// A reconnecting front end must not reach a server that no longer listens: QEMU, and its guest, would wait for the answer.
#[test]
fn of_a_server_that_ends_while_a_disk_does_not_answer() {
    let rig = Rig::polling(1, PollLimit::Never);
    let slow = Arc::new(Faulty::new(ram(1 << 20), FaultPlan::default()));
    slow.inject(Fault {
        kind: IoKind::Flush,
        skip: 0,
        times: 1,
        action: FaultAction::Hold,
    });
    let (stuck, other) = (
        rig.serve("stuck", slow.clone(), 1),
        rig.serve_ram("other", 1),
    );
    let mut at_stuck = connect(&stuck);
    let mut queue = start_blk(&mut at_stuck, 0);
    let slot = queue.take().unwrap();
    assert!(queue.submit(slot, kind::FLUSH, 0, 0, 0));
    queue.publish();
    let at_other = connect(&other);
    let Rig {
        server,
        pool,
        directory,
    } = rig;
    std::thread::scope(|scope| {
        scope.spawn(|| drop(server));
        at_other.channel().wait_closed(SOON).unwrap();
        let before = Instant::now();
        while UnixStream::connect(&other).is_ok() && before.elapsed() < SOON {
            std::thread::sleep(Duration::from_millis(10));
        }
        let second = UnixStream::connect(&other);
        slow.release();
        assert!(second.is_err());
    });
    drop((queue, at_stuck, pool, directory));
}

/// A silent front end sends its first message while its connection is being closed for a newer one.
#[test]
fn of_a_silent_front_end_that_gives_way() {
    let rig = Rig::polling(1, PollLimit::Never);
    let good = rig.serve_ram("good", 1);
    let silent: Vec<_> = (0..16)
        .map(|number| {
            let socket = rig.serve_ram(&format!("bad{number}"), 1);
            let channel = Channel::connect(&socket).unwrap();
            (socket, channel, lingering())
        })
        .collect();
    std::thread::sleep(Duration::from_millis(1200));
    let mut connections = Vec::new();
    for (socket, channel, (lingering_stream, peer)) in silent {
        let fds = [lingering_stream.as_fd()];
        channel.send(request::SET_OWNER, 0, &[], &fds).unwrap();
        // Either side may be the last one to close the descriptor.
        std::thread::spawn(move || drop(lingering_stream));
        connections.push((UnixStream::connect(socket), channel, peer));
    }
    let (sender, result) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| sender.send(FrontEnd::connect(&good, &Options::default()).is_ok()));
        let connected = result.recv_timeout(SOON);
        drop(connections);
        assert_eq!(connected, Ok(true));
    });
}
