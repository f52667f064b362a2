//! An XML document with a reader that records read nodes, so that unread ones can be listed.

use roxmltree::{Document, Node, NodeId};
use std::cell::RefCell;
use std::collections::HashSet;

/// A document and the set of read nodes.
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

    /// Returns the root element and marks it as read.
    pub(super) fn root(&self) -> Node<'d, 'd> {
        let root = self.document.root_element();
        self.elements.borrow_mut().insert(root.id());
        root
    }

    /// Returns children of this name without marking them as read.
    pub(super) fn candidates(
        &self,
        node: Node<'d, 'd>,
        name: &'static str,
    ) -> impl Iterator<Item = Node<'d, 'd>> + use<'d> {
        let children = node.children();
        children.filter(move |child| child.is_element() && child.tag_name().name() == name)
    }

    /// Marks an element as read, without its attributes and children.
    pub(super) fn take(&self, node: Node<'d, 'd>) {
        self.elements.borrow_mut().insert(node.id());
    }

    /// Returns the first child of this name and marks it as read.
    pub(super) fn child(&self, node: Node<'d, 'd>, name: &'static str) -> Option<Node<'d, 'd>> {
        let child = self.candidates(node, name).next()?;
        self.take(child);
        Some(child)
    }

    /// Returns the text of the first child of this name and marks it as read.
    pub(super) fn text(&self, node: Node<'d, 'd>, name: &'static str) -> Option<&'d str> {
        Some(self.child(node, name)?.text().unwrap_or_default().trim())
    }

    /// Returns an attribute without marking it as read.
    pub(super) fn peek(&self, node: Node<'d, 'd>, name: &str) -> Option<&'d str> {
        node.attribute(name)
    }

    /// Returns an attribute and marks it as read.
    pub(super) fn attribute(&self, node: Node<'d, 'd>, name: &str) -> Option<&'d str> {
        let value = node.attribute(name)?;
        let mut attributes = self.attributes.borrow_mut();
        attributes.insert((node.id(), name.to_owned()));
        Some(value)
    }

    /// Parses an attribute with `read` and marks it as read if that succeeds.
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

    /// Returns the path of a node: `/domain/devices/disk[2]`.
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

    /// Returns everything that was not read, with values. An unread element stands for all of its content.
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

/// Describes an element by its attributes and text.
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
