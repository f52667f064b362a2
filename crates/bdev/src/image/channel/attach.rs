//! Attaching of a worker to an image and all images below it.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use uring::{Owner, WatchId};

use super::{BackingChannel, BackingState, ClosedNotice, ImageChannel};
use crate::admit::Limits;
use crate::image::SharedImage;
use crate::image::owner::{Answer, Request};
use crate::inbox::Inbox;
use crate::slots::Slots;
use crate::{Attach, BlockDevice, IoChannel};

/// Channels of the files of an image.
struct Files {
    data: Box<dyn IoChannel>,
    owners: Vec<Owner>,
    tables: Option<(Box<dyn IoChannel>, Vec<Owner>)>,
}

impl Files {
    #[inline(never)]
    fn attach(shared: &SharedImage, attach: &mut Attach<'_>) -> io::Result<Files> {
        let (data, owners) = attach.below(|attach| shared.data().attach(attach))?;
        let tables = match shared.data_file {
            Some(_) => Some(attach.below(|attach| shared.file.attach(attach))?),
            None => None,
        };
        Ok(Files {
            data,
            owners,
            tables,
        })
    }
}

impl ImageChannel {
    /// Attaches to an image and its backing image. Calls itself once for each image of a chain, so other functions create the large values:
    /// a chain of the maximum length then fits on a stack of 2 MiB.
    pub fn attach(
        shared: &Arc<SharedImage>,
        requests: Sender<Request>,
        attach: &mut Attach<'_>,
    ) -> io::Result<Box<dyn IoChannel>> {
        let files = Files::attach(shared, attach)?;
        let owner = attach.owner();
        let inbox = Arc::new(Inbox::new(attach.ring().event()?));
        let backing = match shared.backing.join(&inbox) {
            Some((device, user)) => Some(BackingChannel {
                channel: device.attach(attach)?,
                state: BackingState::InUse,
                _user: user,
            }),
            None => None,
        };
        let watch = inbox.watch(attach.ring(), owner)?;
        let channel = ImageChannel::new(shared, requests, files, backing, inbox, (owner, watch));
        // The owner ends a turn without channels.
        if channel.shared.is_unread() {
            // Fails only if the owner thread has ended; that defect is already logged.
            channel.requests.send(Request::Opened).ok();
        }
        Ok(channel)
    }

    #[inline(never)]
    fn new(
        shared: &Arc<SharedImage>,
        requests: Sender<Request>,
        files: Files,
        backing: Option<BackingChannel>,
        inbox: Arc<Inbox<Answer>>,
        (owner, watch): (Owner, WatchId),
    ) -> Box<ImageChannel> {
        let (map_number, map) = shared.map();
        Box::new(ImageChannel {
            limits: Limits::of(&shared.info, &shared.capacity),
            reader: shared.readers.add(),
            shared: Arc::clone(shared),
            map,
            map_number,
            file: files.data,
            file_owners: files.owners,
            tables: files.tables,
            covered: match backing {
                Some(_) => shared.backing.bytes(),
                None => 0,
            },
            backing,
            owner,
            _closed: ClosedNotice(requests.clone()),
            requests,
            inbox,
            watch: Some(watch),
            next_token: 0,
            slots: Slots::default(),
            finished_below: Vec::new(),
            answers: Vec::new(),
        })
    }
}
