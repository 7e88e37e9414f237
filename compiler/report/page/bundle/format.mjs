// Formats the scripts of the page: npm run format.
import { createFromBuffer } from "@dprint/formatter";
import { getPath } from "@dprint/typescript";
import { readFileSync, writeFileSync } from "node:fs";

const formatter = createFromBuffer(readFileSync(getPath()));
formatter.setConfig({ lineWidth: 120, indentWidth: 2 }, { preferHanging: true,
  "arrowFunction.useParentheses": "preferNone", "arguments.preferHanging": "always",
  "parameters.preferHanging": "always", "arrayExpression.preferHanging": "always",
  "objectExpression.preferSingleLine": true, "nextControlFlowPosition": "maintain" });
for (const name of process.argv.slice(2)) {
  writeFileSync(name, formatter.formatText({ filePath: name, fileText: readFileSync(name, "utf8") }));
}
