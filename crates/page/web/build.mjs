// Builds the page: one HTML file with everything in it. `node build.mjs FILE` writes it; the same sources give the same bytes.

import { readFile, writeFile } from "node:fs/promises";
import { build } from "esbuild";

const out = process.argv[2] ?? "../src/page.html";
const here = (name) => new URL(name, import.meta.url);
const bundled = async (entry) => {
  const built = await build({
    entryPoints: [new URL(entry, import.meta.url).pathname],
    bundle: true,
    write: false,
    minify: true,
    charset: "utf8",
    target: "es2022",
    format: "iife",
    // The library's own licence stands in the page as a whole, below.
    legalComments: "none",
  });
  return built.outputFiles[0].text.trim();
};

const page = await readFile(here("page.html"), "utf8");
const licence = await readFile(here("node_modules/uplot/LICENSE"), "utf8");
const parts = {
  licence: `uPlot, which draws the curves:\n\n${licence.trim()}`,
  style: await bundled("page.css"),
  script: (await bundled("src/main.ts")).replaceAll("</script", "<\\/script"),
};
const whole = page.replace(/%(licence|style|script)%/g, (_, part) => parts[part]);
await writeFile(out, whole);
console.log(`${out}: ${Buffer.byteLength(whole)} bytes`);
