//! Attaching of a worker to an image and all images below it.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use super::{BackingChannel, BackingState, ClosedNotice, Files, ImageChannel, OwnerLink};
use crate::admit::Limits;
use crate::image::SharedImage;
use crate::image::owner::Request;
use crate::inbox::Inbox;
use crate::slots::Slots;
use crate::watched_inbox::WatchedInbox;
use crate::{Attach, BlockDevice, IoChannel};

impl Files {
    #[inline(never)]
    fn attach(shared: &SharedImage, attach: &mut Attach<'_>) -> io::Result<Files> {
        let (data, data_owners) = attach.below(|attach| shared.data().attach(attach))?;
        let tables = match shared.data_file {
            Some(_) => Some(attach.below(|attach| shared.file.attach(attach))?),
            None => None,
        };
        Ok(Files {
            data,
            data_owners,
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
        let inbox = WatchedInbox::of(inbox, attach.ring(), owner, 0)?;
        let image_owner = OwnerLink {
            requests,
            next_token: 0,
            inbox,
            owner,
        };
        let channel = ImageChannel::new(shared, files, backing, image_owner);
        // The owner ends a turn without channels.
        if channel.shared.is_unread() {
            // Fails only if the owner thread has ended; that defect is already logged.
            channel.image_owner.requests.send(Request::Opened).ok();
        }
        Ok(channel)
    }

    #[inline(never)]
    fn new(
        shared: &Arc<SharedImage>,
        files: Files,
        backing: Option<BackingChannel>,
        image_owner: OwnerLink,
    ) -> Box<ImageChannel> {
        let (map_number, map) = shared.map.current();
        Box::new(ImageChannel {
            limits: Limits::of(&shared.info, &shared.capacity),
            reader: shared.readers.add(),
            shared: Arc::clone(shared),
            map,
            map_number,
            files,
            covered: match backing {
                Some(_) => shared.backing.bytes(),
                None => 0,
            },
            backing,
            _closed: ClosedNotice(image_owner.requests.clone()),
            image_owner,
            slots: Slots::default(),
            finished_below: Vec::new(),
        })
    }
}
