//! SVG to PNG.

use anyhow::{Context, Result};
use resvg::tiny_skia::{Pixmap, Transform};
use resvg::usvg::{Options, Tree};

/// Draws with the machine's fonts; where there are none, pictures are without words.
pub struct Painter {
    options: Options<'static>,
}

impl Default for Painter {
    fn default() -> Self {
        let mut options = Options::default();
        options.fontdb_mut().load_system_fonts();
        Painter { options }
    }
}

impl Painter {
    /// Looks for fonts.
    pub fn new() -> Painter {
        Painter::default()
    }

    /// The picture as PNG.
    ///
    /// # Errors
    /// When the SVG is none.
    pub fn png(&self, svg: &str) -> Result<Vec<u8>> {
        let tree = Tree::from_str(svg, &self.options).context("an SVG of ours is none")?;
        let size = tree.size().to_int_size();
        let mut pixels = Pixmap::new(size.width(), size.height()).context("an empty picture")?;
        resvg::render(&tree, Transform::default(), &mut pixels.as_mut());
        pixels.encode_png().context("cannot encode a picture")
    }
}
