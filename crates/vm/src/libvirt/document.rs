//! An XML document whose reader notes what it has read, so that the rest can be named.

use roxmltree::{Document, Node, NodeId};
use std::cell::RefCell;
use std::collections::HashSet;

/// A document and what has been read of it.
pub(super) struct Reader<'d> {
    document: &'d Document<'d>,
    elements: RefCell<HashSet<NodeId>>,
    attributes: RefCell<HashSet<(NodeId, String)>>,
}

impl<'d> Reader<'d> {
    pub(super) fn new(document: &'d Document<'d>) -> Reader<'d> {
        Reader {
            document,
            elements: RefCell::default(),
            attributes: RefCell::default(),
        }
    }

    /// The outermost element, which counts as read.
    pub(super) fn root(&self) -> Node<'d, 'd> {
        let root = self.document.root_element();
        self.elements.borrow_mut().insert(root.id());
        root
    }

    /// Children of this name, none of which counts as read yet.
    pub(super) fn candidates(
        &self,
        node: Node<'d, 'd>,
        name: &'static str,
    ) -> impl Iterator<Item = Node<'d, 'd>> + use<'d> {
        let children = node.children();
        children.filter(move |child| child.is_element() && child.tag_name().name() == name)
    }

    /// The element counts as read; its attributes and children do not.
    pub(super) fn take(&self, node: Node<'d, 'd>) {
        self.elements.borrow_mut().insert(node.id());
    }

    /// The first child of this name, as read.
    pub(super) fn child(&self, node: Node<'d, 'd>, name: &'static str) -> Option<Node<'d, 'd>> {
        let child = self.candidates(node, name).next()?;
        self.take(child);
        Some(child)
    }

    /// The text of the first child of this name, as read.
    pub(super) fn text(&self, node: Node<'d, 'd>, name: &'static str) -> Option<&'d str> {
        Some(self.child(node, name)?.text().unwrap_or_default().trim())
    }

    /// An attribute, without counting it as read.
    pub(super) fn peek(&self, node: Node<'d, 'd>, name: &str) -> Option<&'d str> {
        node.attribute(name)
    }

    /// An attribute, as read.
    pub(super) fn attribute(&self, node: Node<'d, 'd>, name: &str) -> Option<&'d str> {
        let value = node.attribute(name)?;
        let mut attributes = self.attributes.borrow_mut();
        attributes.insert((node.id(), name.to_owned()));
        Some(value)
    }

    /// An attribute that `read` understands; else it stays unread.
    pub(super) fn parsed<T>(
        &self,
        node: Node<'d, 'd>,
        name: &str,
        read: impl FnOnce(&str) -> Option<T>,
    ) -> Option<T> {
        let value = read(node.attribute(name)?)?;
        self.attribute(node, name);
        Some(value)
    }

    /// Where a node is: `/domain/devices/disk[2]`.
    pub(super) fn path(&self, node: Node<'d, 'd>) -> String {
        let mut parts = Vec::new();
        let mut at = Some(node);
        while let Some(node) = at.filter(Node::is_element) {
            let name = node.tag_name().name();
            let siblings = node
                .parent()
                .into_iter()
                .flat_map(|parent| parent.children());
            let same: Vec<NodeId> = siblings
                .filter(|sibling| sibling.is_element() && sibling.tag_name().name() == name)
                .map(|sibling| sibling.id())
                .collect();
            let index = same.iter().position(|id| *id == node.id());
            parts.push(match (same.len(), index) {
                (0 | 1, _) | (_, None) => name.to_owned(),
                (_, Some(index)) => format!("{name}[{}]", index + 1),
            });
            at = node.parent();
        }
        parts.reverse();
        format!("/{}", parts.join("/"))
    }

    /// Everything that was not read, with values: an element that was not read stands for all that is in it.
    pub(super) fn unread(&self) -> Vec<String> {
        let mut unread = Vec::new();
        self.collect(self.document.root_element(), &mut unread);
        unread
    }

    fn collect(&self, node: Node<'d, 'd>, unread: &mut Vec<String>) {
        if !self.elements.borrow().contains(&node.id()) {
            unread.push(format!("{}{}", self.path(node), summary(node)));
            return;
        }
        for attribute in node.attributes() {
            let key = (node.id(), attribute.name().to_owned());
            if !self.attributes.borrow().contains(&key) {
                unread.push(format!(
                    "{}/@{} = {:?}",
                    self.path(node),
                    attribute.name(),
                    attribute.value()
                ));
            }
        }
        for child in node.children().filter(Node::is_element) {
            self.collect(child, unread);
        }
    }
}

/// What tells an element from others of its name.
fn summary(node: Node<'_, '_>) -> String {
    let attributes = node.attributes();
    let attributes =
        attributes.map(|attribute| format!(" {}={:?}", attribute.name(), attribute.value()));
    let text = node.text().unwrap_or_default().trim();
    let text = match text.is_empty() {
        true => String::new(),
        false => format!(" {text:?}"),
    };
    format!("{}{text}", attributes.collect::<String>())
}
