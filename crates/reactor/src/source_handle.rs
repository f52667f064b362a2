//! Address of one source on its worker, for messages from any thread.
//!
//! A transport creates one for each connection, with [`SourceHandle::add`]. Control plane only.

use std::any::Any;
use std::convert::Infallible;
use std::marker::PhantomData;
use std::sync::mpsc;
use std::time::Duration;

use crate::{Io, Source, SourceId, Worker, WorkerHandle};

/// A source with a handle.
pub trait Addressed: Source + Sized {
    /// Returns the handle that the source was created with.
    fn handle(&self) -> &SourceHandle<Self>;
}

/// Address of a source of type `S`. `number` distinguishes sources that had the same place in turn.
pub struct SourceHandle<S> {
    /// The worker.
    pub worker: WorkerHandle,
    /// Place of the source in its worker.
    pub source: SourceId,
    /// Number of the source, unique in its transport.
    pub number: u64,
    kind: PhantomData<fn(&mut S)>,
}

impl<S> Clone for SourceHandle<S> {
    fn clone(&self) -> Self {
        SourceHandle {
            worker: self.worker.clone(),
            source: self.source,
            number: self.number,
            kind: PhantomData,
        }
    }
}

impl<S: Addressed> SourceHandle<S> {
    /// Adds a source to a worker. The caller wakes it.
    pub fn add(
        worker: &mut Worker,
        number: u64,
        create: impl FnOnce(&mut Io, SourceHandle<S>) -> S,
    ) -> SourceHandle<S> {
        let handle = |source, worker: &WorkerHandle| SourceHandle {
            worker: worker.clone(),
            source,
            number,
            kind: PhantomData,
        };
        let own = worker.handle().clone();
        let added = worker.add(|io, source| {
            let source = create(io, handle(source, &own));
            Ok::<_, Infallible>(Box::new(source))
        });
        match added {
            Ok(source) => handle(source, &own),
            Err(never) => match never {},
        }
    }

    /// Runs `message` with the source, if it exists.
    pub fn with<T>(
        &self,
        worker: &mut Worker,
        message: impl FnOnce(&mut S, &mut Io) -> T,
    ) -> Option<T> {
        let (source, io) = worker.source(self.source)?;
        let source = (source as &mut dyn Any).downcast_mut::<S>()?;
        (source.handle().number == self.number).then(|| message(source, io))
    }

    /// Runs `message` with the source, on its worker, and wakes the source. Has no effect if the source has ended by then.
    pub fn send(&self, message: impl FnOnce(&mut S, &mut Io) + Send + 'static)
    where
        S: 'static,
    {
        let handle = self.clone();
        self.worker.send(move |worker| {
            if handle.with(worker, message).is_some() {
                worker.wake(handle.source);
            }
        });
    }

    /// Stops the source between two iterations, as [`Worker::stop`] does.
    pub fn stop(&self) {
        let handle = self.clone();
        self.worker.send(move |worker| {
            if handle.with(worker, |_, _| {}).is_some() {
                worker.stop(handle.source, |_, _| {});
            }
        });
    }

    /// Runs `end` with each source, which keeps the sender until it has drained. Waits for all of them. Returns false after `timeout`.
    pub fn drain_all(
        handles: &[SourceHandle<S>],
        timeout: Duration,
        end: impl Fn(&mut S, &mut Io, mpsc::Sender<()>) + Clone + Send + 'static,
    ) -> bool {
        let (drained, all_drained) = mpsc::channel();
        for handle in handles {
            let (end, drained) = (end.clone(), drained.clone());
            handle.send(move |source, io| end(source, io, drained));
        }
        drop(drained);
        all_drained.recv_timeout(timeout) != Err(mpsc::RecvTimeoutError::Timeout)
    }
}
