//! Conversion of SVG to PNG.

use anyhow::{Context, Result};
use resvg::tiny_skia::{Pixmap, Transform};
use resvg::usvg::{Options, Tree};

/// Renderer with the machine's fonts. Without fonts, pictures have no text.
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
    /// Loads the fonts.
    pub fn new() -> Painter {
        Painter::default()
    }

    /// Renders an SVG as PNG.
    ///
    /// # Errors
    /// The SVG is invalid.
    pub fn png(&self, svg: &str) -> Result<Vec<u8>> {
        let tree = Tree::from_str(svg, &self.options).context("the generated SVG is invalid")?;
        let size = tree.size().to_int_size();
        let mut pixels =
            Pixmap::new(size.width(), size.height()).context("the picture is empty")?;
        resvg::render(&tree, Transform::default(), &mut pixels.as_mut());
        pixels.encode_png().context("cannot encode a picture")
    }
}
