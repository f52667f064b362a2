// Questions before a change. A refusal of the daemon appears beside the button, and the input stays.

import { $, element } from "./dom";

export interface Field {
  name: string;
  label: string;
  placeholder?: string;
  value?: string;
  isRequired?: boolean;
  /** Values of a choice, with their texts. */
  choices?: [string, string][];
  /** Several of the choices may be selected. Their values are joined by spaces. */
  isMultiple?: boolean;
}

export interface Question {
  title: string;
  note?: string;
  fields?: Field[];
  /** Text of the button. */
  action: string;
  /** Makes the change, or throws the reason of a refusal. */
  run: (value: (name: string) => string) => Promise<void>;
}

/** Most lines of a field with several values. */
const CHOICES_SHOWN = 6;

type Control = HTMLInputElement | HTMLSelectElement;

function valueOf(control: Control | undefined): string {
  if (control instanceof HTMLSelectElement && control.multiple) {
    return [...control.selectedOptions].map((option) => option.value).join(" ");
  }
  return control?.value.trim() ?? "";
}

function controlOf(field: Field): Control {
  if (field.choices) {
    const select = element("select");
    select.append(...field.choices.map(([value, text]) => new Option(text, value, false, value === field.value)));
    select.multiple = field.isMultiple ?? false;
    if (select.multiple) select.size = Math.min(CHOICES_SHOWN, Math.max(2, field.choices.length));
    select.required = field.isRequired ?? false;
    return select;
  }
  const input = element("input");
  input.autocomplete = "off";
  input.placeholder = field.placeholder ?? "";
  input.value = field.value ?? "";
  input.required = field.isRequired ?? false;
  return input;
}

/** Shows a refusal; an empty text removes it. */
export function showRefusal(id: string, text: string): void {
  $(id).textContent = text;
  $(id).hidden = !text;
}

export function ask(question: Question): void {
  const dialog = $<HTMLDialogElement>("ask");
  $("ask-title").textContent = question.title;
  $("ask-note").textContent = question.note ?? "";
  $("ask-note").hidden = !question.note;
  const controls = new Map<string, Control>();
  const labels = (question.fields ?? []).map((field) => {
    const label = element("label", field.label);
    const control = controlOf(field);
    control.name = field.name;
    controls.set(field.name, control);
    label.append(control);
    return label;
  });
  $("ask-fields").replaceChildren(...labels);
  showRefusal("ask-problem", "");
  const button = $<HTMLButtonElement>("ask-do");
  button.textContent = question.action;
  button.disabled = false;
  $("ask-cancel").onclick = () => dialog.close();
  $<HTMLFormElement>("ask-form").onsubmit = async (event) => {
    event.preventDefault();
    button.disabled = true;
    showRefusal("ask-problem", "");
    try {
      await question.run((name) => valueOf(controls.get(name)));
      dialog.close();
    } catch (error) {
      showRefusal("ask-problem", (error as Error).message);
    } finally {
      button.disabled = false;
    }
  };
  dialog.showModal();
}
