//! Models of a worker's mailbox, and of an inbox for answers of a device's threads.

use std::sync::Arc;

use loom::thread;

use crate::inbox::Inbox;
use crate::mailbox::{Mailbox, WorkerHandle};
use crate::{Event, Worker, explore};

fn handle() -> WorkerHandle {
    WorkerHandle {
        mailbox: Mailbox::new(Event::default()),
        index: 0,
    }
}

/// Two threads send messages. The worker sleeps whenever the bell has not rung, and executes both.
pub fn every_message_wakes_the_worker() {
    explore(3, || {
        let handle = handle();
        let senders = [1, 2].map(|_| {
            let handle = handle.clone();
            thread::spawn(move || handle.send(|worker| worker.executed += 1))
        });
        let mut worker = Worker::default();
        while worker.executed < 2 {
            handle.mailbox.bell().wait();
            for message in handle.mailbox.take() {
                message(&mut worker);
            }
        }
        for sender in senders {
            sender.join().unwrap();
        }
    });
}

/// A thread calls a worker that ends at some moment. The call returns: with a result or with an error.
pub fn callers_of_an_ending_worker_return() {
    explore(3, || {
        let handle = handle();
        let caller = {
            let handle = handle.clone();
            thread::spawn(move || handle.call(|worker| worker.executed).is_ok())
        };
        let mut worker = Worker { executed: 7 };
        let mut executed = false;
        for message in handle.mailbox.take() {
            message(&mut worker);
            executed = true;
        }
        handle.mailbox.close();
        assert_eq!(caller.join().unwrap(), executed);
    });
}

/// Two threads of a device answer. The worker sleeps whenever the event is clear, and takes both answers.
pub fn every_answer_wakes_the_worker() {
    explore(3, || {
        let inbox = Arc::new(Inbox::new(Event::default()));
        let threads = [1, 2].map(|token| {
            let inbox = inbox.clone();
            thread::spawn(move || inbox.put(token, token))
        });
        let (mut taken, mut answers) = (0, Vec::new());
        while taken < 2 {
            inbox.event.wait();
            inbox.take(&mut answers);
            taken += answers.drain(..).count();
        }
        for thread in threads {
            thread.join().unwrap();
        }
    });
}
